"""The 50 items of `edgeinfer eval basics`, scored by lm-evaluation-harness: python sessions/lm_eval_basics.py URL MODEL > OUT.

Run with the client's own packages (`install.py lm-eval`) against `edgeinfer serve`. Nothing of edgeinfer is imported: the
choices are its multiple choice, the other answers its `generate_until` with the checks written once more here. OUT is kept as
recorded/lm_eval_basics.json, with which tests/cli/test_eval.py compares.
"""

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import lm_eval
from lm_eval.tasks import TaskManager

SET = Path(__file__).parents[3] / "edgeinfer/data/eval-basics.jsonl"
TASK = """task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
doc_to_text: prompt
"""
CHOICES = """output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
OTHERS = """output_type: generate_until
doc_to_target: ""
generation_kwargs: {until: [], max_gen_toks: TOKENS, temperature: 0, do_sample: false, cache_prompt: false}
metric_list: [{metric: bypass}]
"""


def passes(item: dict[str, Any], answer: str) -> bool:
    """Check an answer as the guide describes."""
    if "exact" in item:
        return answer.strip() in item["exact"]
    if "contains" in item:
        return item["contains"].lower() in answer.lower()
    if "regex" in item:
        return bool(re.search(item["regex"], answer))
    if "number" in item:
        numbers = re.findall(r"(?<!\d)-?\d+(?:\.\d+)?", answer.replace(",", ""))
        return bool(numbers) and abs(float(numbers[-1]) - item["number"]) <= item.get("tolerance", 0)
    unfenced = re.sub(r"^\s*```\w*\n(.*)\n\s*```\s*$", r"\1", answer, flags=re.S)
    try:
        jsonschema.validate(json.loads(unfenced), item["schema"])
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def run(name: str, items: list[dict[str, Any]], kind: str, **arguments: Any) -> Iterator[Any]:
    """Evaluate one task; yield each item with its logged sample."""
    api = "local-completions" if kind is CHOICES else "local-chat-completions"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.jsonl")
        rows = [
            {k: item[k] for k in ("id", "prompt", "choices", "answer") if k in item} for item in items
        ]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = TASK.replace("NAME", name).replace("FILE", str(file))
        Path(folder, f"{name}.yaml").write_text(task + kind)
        done = lm_eval.simple_evaluate(
            model=api,
            model_args={
                "tokenizer_backend": "remote",
                "batch_size": 1,
                "max_length": 2048,
                **arguments,
            },
            tasks=[name],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            log_samples=True,
            apply_chat_template=api == "local-chat-completions",
            bootstrap_iters=0,
        )
    samples = sorted(done["samples"][name], key=lambda sample: sample["doc_id"])
    yield from zip(items, samples, strict=True)


def main(url: str, model: str) -> dict[str, Any]:
    """Return what became of every item."""
    items = [json.loads(line) for line in SET.read_text("utf-8").splitlines()]
    choices = [item for item in items if "choices" in item]
    results: dict[str, Any] = {}
    plain = {"model": model, "base_url": f"{url}/v1/completions", "tokenized_requests": True}
    for item, sample in run("choices", choices, CHOICES, **plain):
        logprobs = [round(float(logprob[0][0]), 4) for logprob in sample["resps"]]
        results[item["id"]] = {"passed": sample["acc"] == 1, "logprobs": logprobs}
    chat = {"model": model, "base_url": f"{url}/v1/chat/completions", "num_concurrent": 1}
    for tokens in sorted({item["max_tokens"] for item in items if "max_tokens" in item}):
        group = [item for item in items if item.get("max_tokens") == tokens]
        for item, sample in run(f"chat_{tokens}", group, OTHERS.replace("TOKENS", str(tokens)), **chat):
            answer = sample["resps"][0][0]
            results[item["id"]] = {"passed": passes(item, answer), "answer": answer}
    in_order = {item["id"]: results[item["id"]] for item in items}
    return {"lm_eval": version("lm_eval"), "model": model, "items": in_order}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        outcome = main(*sys.argv[1:])
    print(json.dumps(outcome, ensure_ascii=False).replace('}, "', '},\n"'))
