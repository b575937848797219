"""scripts/style.py and scripts/commit_msg.py refuse words, shapes of code and commit subjects."""

import commit_msg
import pytest
import style


@pytest.mark.parametrize(
    "source",
    [
        '"""Forget computed blocks."""\n',
        "# the roster is full\n",
        "def test_newcomers_wait():\n    pass\n",
        "class MinderCell:\n    pass\n",
        'raise ValueError("whoever asks is refused")\n',
        'def f():\n    """Whether it is on."""\n',
    ],
    ids=["docstring", "comment", "test name", "class name", "error text", "relative clause"],
)
def test_refused_words_are_found_in_python(source):
    assert [line for line, _ in style.python_words(source)] == [1]


def test_field_words_and_prompts_of_tests_are_accepted():
    assert not list(style.python_words('"""Evict cached sequences."""\nx = 1  # resident memory\n'))
    assert not list(style.python_words('ask("the roster of a minder")\n', strings=False))


def test_code_and_generated_parts_of_documents_are_skipped():
    text = "a roster\n`minder` [x](roster.md)\n```\nminder\n```\n<!-- generated: x -->\nminder\n<!-- end -->\na minder\n"
    assert [line for line, _ in style.document_words(text)] == [1, 9]


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = 1 if a else 2 if b else 3\n", [1]),
        ("x = 1 if a else 2\n", []),
        ("a, b, c = 1, 2, 3\n", [1]),
        ("a, b, c = 1, 2, 3  # together: a vector\n", []),
    ],
)
def test_nested_conditionals_and_wide_assignments_are_found(source, lines):
    assert [line for line, _ in style.findings(source)] == lines


@pytest.mark.parametrize(
    ("subject", "count"),
    [
        ("prefix cache: store the last partial block", 0),
        ("prefix cache: store the computed blocks", 1),
        ("server: " + "x" * 65, 1),
        ("server: close idle connections.", 1),
    ],
)
def test_commit_subjects_are_short_and_in_the_fields_words(subject, count):
    assert len(commit_msg.findings(subject)) == count
