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
    try:
        jsonschema.validate(
            json.loads(re.sub(r"^\s*```\w*\n(.*)\n\s*```\s*$", r"\1", answer, flags=re.S)),
            item["schema"],
        )
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def run(
    folder: Path,
    name: str,
    items: list[dict[str, Any]],
    kind: str,
    model: str,
    arguments: dict[str, Any],
) -> list[Any]:
    """Evaluate one task; the logged samples in the order of the items."""
    file = folder / f"{name}.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {
                    "id": item["id"],
                    "prompt": item["prompt"],
                    **{k: item[k] for k in ("choices", "answer") if k in item},
                }
            )
            + "\n"
            for item in items
        )
    )
    (folder / f"{name}.yaml").write_text(TASK.replace("NAME", name).replace("FILE", str(file)) + kind)
    done = lm_eval.simple_evaluate(
        model=model,
        model_args={"tokenizer_backend": "remote", "batch_size": 1, "max_length": 2048, **arguments},
        tasks=[name],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
    )
    return sorted(done["samples"][name], key=lambda sample: sample["doc_id"])


def main(url: str, model: str) -> dict[str, Any]:
    """Return what became of every item."""
    items = [json.loads(line) for line in SET.read_text("utf-8").splitlines()]
    choices = [item for item in items if "choices" in item]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = {"model": model, "base_url": f"{url}/v1/completions", "tokenized_requests": True}
        for item, sample in zip(
            choices,
            run(Path(folder), "choices", choices, CHOICES, "local-completions", plain),
            strict=True,
        ):
            logprobs = [float(logprob[0][0]) for logprob in sample["resps"]]
            results[item["id"]] = {
                "passed": sample["acc"] == 1,
                "logprobs": [round(logprob, 4) for logprob in logprobs],
            }
        chat = {"model": model, "base_url": f"{url}/v1/chat/completions", "num_concurrent": 1}
        for tokens in sorted({item["max_tokens"] for item in items if "max_tokens" in item}):
            group = [item for item in items if item.get("max_tokens") == tokens]
            kind = OTHERS.replace("TOKENS", str(tokens))
            for item, sample in zip(
                group,
                run(Path(folder), f"chat_{tokens}", group, kind, "local-chat-completions", chat),
                strict=True,
            ):
                answer = sample["resps"][0][0]
                results[item["id"]] = {"passed": passes(item, answer), "answer": answer}
    return {
        "lm_eval": version("lm_eval"),
        "model": model,
        "items": {item["id"]: results[item["id"]] for item in items},
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        outcome = main(*sys.argv[1:])
    print(json.dumps(outcome, ensure_ascii=False).replace('}, "', '},\n"'))
