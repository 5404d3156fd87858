import sys, torch, time
sys.path.insert(0, "src")
from pathlib import Path
from gaugelasso.config import load_config
from gaugelasso.trainer import Trainer
c = load_config(Path("configs/retrieval/main.toml"), {})
tr = Trainer(c, Path("/tmp/prof"), existing="refuse")
for _ in range(20): tr._step()
torch.cuda.synchronize(); t=time.time()
for _ in range(100): tr._step()
torch.cuda.synchronize(); print("graph ms", (time.time()-t)*10)
from torch.profiler import profile, ProfilerActivity
tr._run_step = tr._device_step
tr._step()
with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
    for _ in range(3): tr._step()
    torch.cuda.synchronize()
print(p.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))
