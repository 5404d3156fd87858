import re,subprocess
t=open('docs/results.md').read()
a=t.index("## Polynomial division at the paper's size"); b=t.index("## A character language model at the paper's size")
rows=subprocess.run(['.venv/bin/python','data/dev/table.py','results/ff31/population.json'],capture_output=True,text=True).stdout.split('median')[0].strip()
new=f"""## Polynomial division at the paper's size

`gaugelasso sweep configs/ff31/main.toml --seeds 42-51 --jobs 10`, commit `a5dd6b3`, one H200, ten
runs side by side, 2026-11-16, accounting `paper`, loss target 0.005, 60,000 steps under pressure and
10,000 of cooldown, from 13,179,840 FMA; [main.json](../results/ff31/main.json) has seeds 42–46,
[population.json](../results/ff31/population.json) all ten. "Returns" counts how often the
[watch](concepts.md#the-watch) took a run back to a state that had held its target; free-running
is on 64 problems.

| seed | first batch within the target, step | FMA after | compression | held-out loss | exact match | free-running | returns | seconds |
|---|---|---|---|---|---|---|---|---|
{rows}
| median of 42–46 | | 38,601 | 341× | | | | | |
| median of all | | 43,576 | 302× | | | | | |
| paper, 25 seeds | | | 187× (median of 18 that converge; best 255×) | | 100% | | | |

Every seed starts, and ends within its target, with at least 99.97% exact match of all 254 supervised tokens,
and with 100% where the model reads its own answers. The paper's grammar is known by its counts alone (283
tokens, 44 symbols, 254 supervised): ours has the same counts, but need not be as hard
([FF31](ff31.md)). And the operands of our drills lean to small numbers, which at a small size is what ended the
plateau before the target ([log](log.md)); the paper says no more of its drills than what they are.
Both are reasons to take the comparison with care.

The same seeds at an older commit (`1f728ae`, 2026-11-15) ended at 30,321–57,767 FMA, a median of 346×.
Seed for seed the ratio is anything from 0.57 to 1.82, in the mean 1.10 with an error of 0.12: what one
seed comes to is not repeated from one commit to the next, and whether the newer one compresses less
cannot be told from ten.

Two seeds lost the target for 1,000 steps under pressure and were taken back, with half the
pressure. Seed 44 went back once, from 98k to 160k FMA at step 3,900. Seed 49 went back ten times
before step 23,200, from 63k–70k to 66k–99k; with a thousandth of the pressure it then held a loss of 0.0002 and
fell to 48k all the same. Under pressure
exact match swings widely in all others, around a median of 78–94%, as the loss swings around its
target; a thousand steps into cooldown it is at 97–100%:

![Surviving channels by layer and step, ten seeds](images/ff31-profile.png)
![Loss, exact match, step time and work by step, ten seeds](images/ff31-training.png)

What is left is four to seven of sixteen operators: one to three narrow attentions in layers
0 to 3, the MLPs of layers 0 and 7 in all ten seeds, and up to three more
between them. Which of the middle layers does the work differs from seed to seed.

"""
open('docs/results.md','w').write(t[:a]+new+t[b:])
