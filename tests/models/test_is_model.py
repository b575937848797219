"""A first word on the command line is a model only when it names one."""

import pytest

from edgeinfer.models.reference import is_model


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smollm2-135m-instruct", True),
        ("qwen3-0.6b:Q4_K_M", True),
        ("hello", False),
        ("Name three colours.", False),
        ("what is 2:3?", False),
        ("./absent.gguf", False),
        ("/etc/passwd", False),
        ("", False),
    ],
)
def test_names_are_told_from_prompts(text, expected):
    assert is_model(text) is expected


def test_gguf_file_that_is_there(smollm2):
    assert is_model(str(smollm2))
