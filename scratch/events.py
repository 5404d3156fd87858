import json,sys,collections
for s in range(42,52):
    ev=[json.loads(l) for l in open(f'runs/ff31/seed{s}/events.jsonl')]
    c=collections.Counter(e.get('kind') or e.get('event') for e in ev)
    print(s,dict(c), [ (e.get('step'),e.get('to') or e.get('back_to') ) for e in ev if 'return' in str(e.get('kind') or e.get('event'))][:12])
print(ev[5].keys())
