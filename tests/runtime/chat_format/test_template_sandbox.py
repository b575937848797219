"""A hostile chat template ends in our error, soon and in little memory: never a hang, never a
traceback.
"""

import resource

import pytest

from edgeinfer.errors import InvalidRequestError, ModelLoadError
from edgeinfer.platform import process
from edgeinfer.runtime.chat_format import templates
from edgeinfer.runtime.chat_format.templates import ChatTemplate, load_untrusted
from edgeinfer.runtime.requests import Message, limit_preparation

_S = "{% set s='aaaaaaaaaaaaaaaa' %}"
_M = "{% set s='a'*1000000 %}"
HOSTILE = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "macro for ever": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro tree": "{% macro f(n) %}{% if n > 0 %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [1,2] recursive %}{{ loop([1,2]) }}{% endfor %}",
    "long searches": "{% set s='a'*1000000 %}{% for i in range(99999) %}{% set c = s.count('b') %}{% endfor %}",
    "many sorts": "{% set s=range(99999)|list %}{% for x in range(99999) %}{% set y = s|sort(reverse=true) %}{% endfor %}",
    "multiplied": "{{ 'a' * 10000000000 }}",
    "multiplied list": "{{ [1] * 10000000000 }}",
    "power": "{{ 9**60**60 }}",
    "power in steps": "{% set x=9**60 %}{% set x=x**60 %}{% set x=x**60 %}{{ x }}",
    "squares": "{% set x=9999999999 %}" + "{% set x=x*x %}" * 60,
    "doubled by ~": _S + "{% set s = s ~ s %}" * 60 + "{{ s }}",
    "doubled by +": _S + "{% set s = s + s %}" * 60 + "{{ s }}",
    "doubled by blocks": _S + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "doubled by filter blocks": _S
    + "{% set s %}{% filter upper %}{{ s }}{{ s }}{% endfilter %}{% endset %}" * 60,
    "lists of lists": "{% set s=[1] %}" + "{% set s = [s,s] %}" * 60 + "{{ s }}",
    "tuples of tuples": "{% set s=(1,) %}" + "{% set s = (s,s) %}" * 60 + "{{ s|string }}",
    "dicts of dicts": "{% set s={'a':1} %}" + "{% set s = {'a':s,'b':s} %}" * 60 + "{{ s|tojson }}",
    "dict calls": "{% set s={'a':1} %}" + "{% set s = dict(a=s,b=s) %}" * 60 + "{{ s|tojson }}",
    "added lists": "{% set s=[1] %}" + "{% set s = [s]+[s] %}" * 60 + "{{ s }}",
    "varargs": "{% set n=namespace(x=1) %}{% macro f() %}{% set n.x = varargs %}{% endmacro %}"
    + "{{ f(n.x, n.x) }}" * 60,
    "kwargs": "{% set n=namespace(x=1) %}{% macro f() %}{% set n.x = kwargs %}{% endmacro %}"
    + "{{ f(a=n.x, b=n.x) }}" * 60,
    "mapped and joined": _M + "{{ range(100000)|map(attribute='x', default=s)|join }}",
    "joined by method": _M + "{{ ''.join(range(100000)|map(attribute='x', default=s)) }}",
    "mapped to json": _M + "{{ range(100000)|map(attribute='x', default=s)|tojson }}",
    "mapped replaces": "{{ range(100000)|map('replace','', 'a'*10000)|list }}",
    "replaced": _M + "{{ s.replace('', s) }}",
    "replaced by filter": _M + "{{ s|replace('', s) }}",
    "joined with itself": _M + "{{ s.join(s) }}",
    "joined by filter": _M + "{{ s|join(s) }}",
    "escaped": "{% set s=('<'*1000000) %}{{ s|e|e|e|e|e|e|e|e|e|e|e|e }}",
    "padded": "{{ 'a'.center(1000000000) }}",
    "zero-filled": "{{ 'a'.zfill(1000000000) }}",
    "padded by format": "{{ '{:>1000000000}'.format(1) }}",
    "padded by %": "{{ '%1000000000d' % 1 }}",
    "an attribute by format": "{{ '{0.__class__}'.format(messages) }}",
    "split": "{{ ('abc'*7000000).split('c') }}",
    "split by name": "{{ ('abc'*7000000).split(sep='c') }}",
    "split at spaces": "{{ ('a '*7000000).rsplit() }}",
    "split lines": "{{ ('a\u2028'*7000000).splitlines() }}",
    "multiplied small list": "{{ ([1] * 60000000)|length }}",
    "searched backwards": "{% set s='a'*30000000 %}{{ s.rfind('b' ~ 'a'*1000000) }}",
    "stripped": "{% set s='a'*30000000 %}{{ s.strip('b'*1000000 ~ 'a')|length }}",
    "trimmed": "{% set s='a'*30000000 %}{{ s|trim('b'*1000000 ~ 'a')|length }}",
    "sorted copies": _M + "{{ range(99999)|map(attribute='x', default=s)|sort|length }}",
    "unique copies": _M + "{{ range(99999)|map(attribute='x', default=s)|unique|list|length }}",
    "indented": "{{ ('a\n'*1000000)|indent(100000) }}",
    "indented json": "{{ messages|tojson(indent=1000000000) }}",
    "separated json": _M + "{{ range(100000)|list|tojson(separators=(s, s)) }}",
    "wide date": "{{ strftime_now('%9999999999d') }}",
    "marked up": "{{ ('a'|safe) * 10000000000 }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "encoded": "{{ 'a'.encode().ljust(10000000000) }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "many signs": "{{ " + "-" * 50000 + "1 }}",
    "a file": "{% include '/etc/passwd' %}",
    "a module": "{% import 'os' as os %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ namespace.__init__.__globals__ }}",
    "self": "{{ self.__init__.__globals__ }}",
    "globals of ours": "{{ raise_exception.__globals__.sys }}",
    "mutation": "{% do messages.append(1) %}",
    "too long": "a" * (512 * 1024 + 1),
    "not a template": "{% for %}",
    "generation left open": "{% generation %}x",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_template_ends_in_an_error_within_memory_limits(source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((ModelLoadError, InvalidRequestError)):
        ChatTemplate.load(source).render((Message(role="user", content="hi"),))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024


@pytest.mark.parametrize(
    "source", ["{{ ''|attr('__class__') }}", "{{ messages.__class__ }}", "{{ messages['__class__'] }}"]
)
def test_python_internals_are_not_rendered(source):
    assert ChatTemplate.load(source).render((Message(role="user", content="hi"),)) == ""


def test_template_hostile_after_probing_still_ends():
    late = "{{ messages[0].content }}{% if messages[0].content == 'now' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    late += "{% endfor %}{% endfor %}{% endif %}"
    template = ChatTemplate.load(late)
    assert template.render((Message(role="user", content="not yet"),)) == "not yet"
    with pytest.raises(InvalidRequestError) as caught:
        template.render((Message(role="user", content="now"),))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 7 % 4 }}", "3"),
        ("{{ 'a,b,c'.split(',', 1) }}{{ 'a b'.split() }}{{ 'a,b'.split(sep=',') }}", "['a', 'b,c']['a', 'b']['a', 'b']"),
        ("{{ 'a,b,c'.rsplit(',', maxsplit=1)[0] }}{{ 'a\nb'.splitlines() }}", "a,b['a', 'b']"),
        ("{{ ' a '|trim ~ 'xax'|trim('x') ~ 'xax'.strip('x') ~ ([1] * 3)|length }}", "aaa3"),
        ("{{ messages|map(attribute='content')|sort|first }}", "hi"),
    ],
)  # fmt: skip
def test_string_methods_and_filters_work(source, text):
    assert ChatTemplate.load(source).render((Message(role="user", content="hi"),)) == text


def test_unknown_template_is_probed_in_a_limited_child(monkeypatch):
    greedy = "{% set s='🙂'*30000000 %}{{ s|length }}"  # within the fuel, but not within the child
    monkeypatch.setattr(templates, "MEMORY_BYTES", 110 << 20)
    with pytest.raises(ModelLoadError) as caught:
        load_untrusted(greedy, "", "")
    assert "was refused: it takes too much memory" in caught.value.message
    with pytest.raises(ModelLoadError) as caught:
        load_untrusted("{% for %}", "", "")
    assert "does not parse" in caught.value.message


def test_known_template_starts_no_child(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    source = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"
    first = load_untrusted(source, "<s>", "</s>")
    monkeypatch.setattr(process, "child_command", lambda *args: ["/nonexistent"])
    template = load_untrusted(source, "<s>", "</s>")
    assert template.traits == first.traits == ChatTemplate.load(source, "<s>", "</s>").traits
    assert load_untrusted(source, "<x>", "</s>").traits == first.traits  # no child: in this process


def test_rendering_ends_at_the_requests_deadline():
    late = "{% if messages[0].content == 'now' %}{% for a in range(99999) %}{% endfor %}{% endif %}"
    template = ChatTemplate.load(late)
    with limit_preparation(0), pytest.raises(InvalidRequestError) as caught:
        template.render((Message(role="user", content="now"),))
    assert "processor time" in caught.value.message


def test_long_conversation_fits_the_fuel():
    template = ChatTemplate.load(
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content|trim }}\n{% endfor %}"
    )
    turns = tuple(Message(role="user", content="word " * 2000) for _ in range(300))
    assert len(template.render(turns)) > 2_900_000
