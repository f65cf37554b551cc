"""From ncu's CSV of gpu__time_duration.sum: the kernels of one step, the costliest first."""

import csv
import re
import sys
from collections import defaultdict


def last_step(names):
    """The range of the last step. A step is the longest sequence that occurs twice in a row."""
    found = range(len(names))
    for length in range(1, len(names) // 2 + 1):
        alike = 0
        for i in range(length, len(names)):
            alike = alike + 1 if names[i] == names[i - length] else 0
            if alike >= length:
                found = range(i + 1 - length, i + 1)
    return found


def short(name):
    """Without types that say nothing: void f<(int)4>(const T1 *) is f<4>."""
    return re.sub(r"\([^()]*\)$", "", re.sub(r"\((int|bool|unsigned int)\)", "", name)).removeprefix("void ")


rows = list(csv.DictReader(line for line in sys.stdin if line.startswith('"')))
names = [short(row["Kernel Name"]) for row in rows]
if not names:
    sys.exit("the profiler saw no kernel")
kernels = defaultdict(list)
for i in last_step(names):
    kernels[names[i]].append(float(rows[i]["Metric Value"].replace(",", "")) / 1e6)
total = sum(map(sum, kernels.values()))
print(f"{total:9.3f} ms  {sum(map(len, kernels.values())):4} launches")
for name, times in sorted(kernels.items(), key=lambda kernel: -sum(kernel[1])):
    print(f"{sum(times):9.3f} ms  {len(times):4}  {100 * sum(times) / total:5.1f} %  {name[:80]}")
