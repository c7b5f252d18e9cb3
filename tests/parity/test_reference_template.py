"""The reference's set-up of Jinja: the engine's prompts, within the same limits."""

import sys

import pytest

from vlfit.checkpoint.processor_files import read_chat_template
from vlfit.checkpoint.source import open_checkpoint
from vlfit.errors import CheckpointError
from vlfit.parity.reference.reference_template import render_reference
from vlfit.prompt.chat_template import ChatTemplate
from vlfit.prompt.template_process import TemplateFailure

MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hello"}]}]


def test_it_renders_as_the_engine_does() -> None:
    source = read_chat_template(open_checkpoint("mini").folder)
    given = {"messages": MESSAGES, "tools": None, "add_generation_prompt": True}
    assert render_reference(source, given) == ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson(separators=(',', ':')) }}",
        "{{ tools | tojson(sort_keys=true, indent=2) }}",
        "{{ tools | tojson(ensure_ascii=true) }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_what_transformers_gives_to_templates_is_there(source: str) -> None:
    given = {"tools": [{"name": "é", "a": [1, 2]}]}
    rendered = render_reference(source, given)
    assert rendered == ChatTemplate(source, {}).render([], tools=given["tools"])
    assert rendered


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not limit memory")
def test_a_template_that_takes_too_much_fails() -> None:
    with pytest.raises(CheckpointError) as caught:
        render_reference("{{ messages[0].role * (10 ** 11) }}", {"messages": MESSAGES})
    assert "512 MiB" in caught.value.message


def test_a_template_that_refuses_and_one_that_fails_are_told_apart() -> None:
    with pytest.raises(CheckpointError):
        render_reference("{{ raise_exception('no') }}", {})
    with pytest.raises(TemplateFailure):
        render_reference("{{ 1 / 0 }}", {})
