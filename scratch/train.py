import sys, time, json
sys.path.insert(0, "src")
from pathlib import Path
from gaugelasso.config import load_config
from gaugelasso.trainer import Trainer
out = sys.argv[1]; conf = sys.argv[2]
c = load_config(Path(conf), dict(a.split("=", 1) for a in sys.argv[3:]))
t0 = time.time()
def show(p):
    r = p.row
    if r["step"] % 500 == 0 or r["step"] <= 200:
        print(out, r["step"], r["phase"], f"loss {r['loss']:.4f} acc {r['accuracy']} fma {r['fma']:.0f} ms {r['step_ms']:.2f} D {r['sites']} ops {r['operators']} rho {r['rho']:.2e} t {time.time()-t0:.0f} mem {r.get('memory_mib',0):.0f}", flush=True)
tr = Trainer(c, Path(out), existing="resume", on_progress=show)
try:
    s = tr.run()
    print("DONE", out, {k: v for k, v in s.items() if k != "structure"}, flush=True)
except Exception as e:
    print("FAIL", out, repr(e), flush=True); raise
