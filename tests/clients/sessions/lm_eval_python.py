"""lm-evaluation-harness with tasks of its own folder: multiple choice and perplexity, tokenized requests."""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

url, model = sys.argv[1:]
QUESTIONS = [
    ("The capital of France is", ["Paris", "carrot", "seventeen"], 0),
    ("Two plus two is", ["a river", "four", "Napoleon"], 1),
    ("Cats like to drink", ["concrete", "sentences", "milk"], 2),
    ("In winter, water freezes to", ["ice", "homework", "an opera"], 0),
]
TEXTS = [
    "Once upon a time there was a little girl who lived in a village near the forest.",
    "The sun rises in the east and sets in the west, and the moon follows it at night.",
]
CHOICE = """task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: CHOICE_FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
PERPLEXITY = """task: local_perplexity
dataset_path: json
dataset_kwargs: {data_files: {test: TEXT_FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


def run(folder: Path) -> dict[str, dict[str, float]]:
    """Write the tasks and evaluate both; the results by task."""
    rows = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in QUESTIONS]
    (folder / "choice.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    (folder / "choice.yaml").write_text(CHOICE.replace("CHOICE_FILE", str(folder / "choice.jsonl")))
    (folder / "text.yaml").write_text(PERPLEXITY.replace("TEXT_FILE", str(folder / "text.jsonl")))
    done = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "remote",
            "tokenized_requests": True,
            "batch_size": 4,
            "max_length": 2048,
        },
        tasks=["local_choice", "local_perplexity"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
    )
    return done["results"]


with tempfile.TemporaryDirectory() as made:
    results = run(Path(made))
assert results["local_choice"]["acc,none"] >= 0.75, results
assert 1 < results["local_perplexity"]["word_perplexity,none"] < 1000, results
print(version("lm_eval"))
