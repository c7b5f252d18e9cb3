"""Templates that would run for hours or take all memory fail at once; others render as Jinja does."""

import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlfit.errors import CheckpointError
from vlfit.prompt.bounded_templates import MAX_TEXT
from vlfit.prompt.chat_template import ChatTemplate

HOSTILE = [
    "{{ 'x' * (10 ** 10) }}",
    "{{ 10000000000 * 'x' }}",
    "{{ [0] * 10000000000 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x=n.x.replace('a','aa') %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x=n.x|replace('a','aa') %}{% endfor %}",
    "{% set x = 'a' * 999999 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 999999 %}{{ x.join(x) }}",
    "{% set x = 'a' * 999999 %}{{ ('{0}' * 999999).format(x) }}",
    "{{ '{:{}}'.format(1, 10000000000) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'x'.center(10000000000) }}",
    "{{ 'x'.zfill(10000000000) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'a\nb' | indent(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ messages | tojson(indent=10000000000) }}",
    "{% set n = namespace(x='\"') %}{% for i in range(60) %}{% set n.x=n.x|tojson %}{% endfor %}",
    "{{ lipsum(1000000000) }}",
    "{{ 'x' | format }}{{ '%10000000000d' | format(1) }}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{% for i in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
]
SOUND = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role ~ ': ' ~ m.content }}\n{% endfor %}",
    "{% for m in messages[::-1] if m.role == 'user' %}{{ m.content | upper }}{% else %}none{% endfor %}",
    "{{ '-' * 20 }}{{ '%02d|%5.2f' % (3, 2.5) }}{{ 7 % 4 }}{{ 3 * 4 + 2 ** 5 }}{{ [1] + [2] }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ 'a\nb' | indent(2) }}{{ 'a'.center(5, '.') }}",
    "{% for c in 'abc' %}{{ c }}{% if c == 'b' %}{% break %}{% endif %}{% endfor %}",
    "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ '{}-{:>3}'.format(1, 2) }}",
    "{% for m in messages recursive %}{{ m.role }}{% endfor %}{{ range(3) | list }}",
    "{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is sequence else i }}{{ loop.depth }}{% endfor %}",
    "{{ 123456 | center(9) }}{{ 123456 | tojson }}{{ [1] | tojson(indent=4) }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ 'a-b'.split('-') | join('+') }}{{ 'aXb'.replace('X', '--') }}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{% set t %}{{ f(2) }}{% endset %}{{ t }}",
]
MESSAGES = [{"role": "user", "content": "one "}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize("source", HOSTILE)
def test_a_hostile_template_fails_soon(source: str) -> None:
    begin = time.process_time()
    with pytest.raises(CheckpointError):
        ChatTemplate(source, {}).render(MESSAGES)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("source", SOUND)
def test_a_sound_template_renders_as_in_jinjas_sandbox(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    expected = plain.from_string(source).render(messages=MESSAGES)
    assert ChatTemplate(source, {}).render(MESSAGES) == expected


def test_a_long_message_is_no_fault_of_the_template() -> None:
    content = "a\n" * MAX_TEXT
    source = "{{ '<' ~ messages[0].content ~ '>' }}{{ messages[0].content.replace('\n', '\n\n') | length }}"
    rendered = ChatTemplate(source, {}).render([{"role": "user", "content": content}])
    assert rendered == f"<{content}>{len(content) * 3 // 2}"
