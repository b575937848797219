"""Print the results of run.sh in the folder OUT, one per line, and the figure: `summary.py OUT`."""

import json
import sys
from pathlib import Path

_FIELDS = "side kv when n_ctx layers equal prompts from_disk same_text same_best kl_mean layers_after error".split()


def main() -> None:
    out = Path(sys.argv[1])
    print("steps: exit, seconds")
    for line in (out / "steps.tsv").read_text().splitlines():
        name, code, seconds = line.split("\t")
        print(f"  {name:12} {code:>4} {seconds:>5}")
    print("findings")
    for line in (out / "results.jsonl").read_text().splitlines():
        finding = json.loads(line)
        fields = [f"{name} {finding[name]}" for name in _FIELDS if name in finding]
        if finding["check"] != "seconds":
            print(f"  {finding['check']:8} {', '.join(fields)[:400]}")
    if (out / "gpu.md").exists():
        print((out / "gpu.md").read_text())


if __name__ == "__main__":
    main()
