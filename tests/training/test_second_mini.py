"""The training model of the second mini is Qwen3.5: the reference's numbers, of drafts and segments too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training.mini.delta_scan import compare
from training.mini.export import WIDE, export, load
from training.mini.inherit import LAYERS, take_over
from training.mini.model import Model
from training.mini.sequences import PIECE, Sequence, Words, begin_with_pictures, stack, visible_mask
from training.mini.shape import MINI35
from training.mini.teller import Exchange
from training.mini.tokenizer import PACKAGE, added_id
from training.mini.train import TINY35
from training.mini.vision_model import patchify

TURNS = [Exchange("name", "What is this?", "It is a dog."), Exchange("x", "Is it?", "Yes.")]
SIZE = (352, 256)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(str(PACKAGE / "tokenizer.json"), hybrid=True)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    model = Model(TINY35)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith(WIDE):
                parameter.copy_((parameter + torch.randn_like(parameter) * 0.05).bfloat16().float())
    return model


@pytest.fixture(scope="module")
def folder(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mini35")
    export(model.state_dict(), model.shape, folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import Qwen3_5ForConditionalGeneration

    return Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def picture() -> Tensor:
    return torch.rand(1, 3, SIZE[1], SIZE[0], generator=torch.Generator().manual_seed(0)) * 2 - 1


def read(model: Model, row: Sequence, picture: Tensor) -> tuple[Tensor, Tensor]:
    """Last states and drafts' states of a row: [length, hidden] each."""
    layout = stack([row])
    tokens, positions, segments, slots = (
        torch.from_numpy(each).long()
        for each in (layout.tokens, layout.positions, layout.segments, layout.slots)
    )
    with torch.no_grad():
        image, levels = model.encode_pictures(picture, 1)
        visible = visible_mask(segments)
        states = model.read(image, levels, tokens, positions, visible, slots, segments)
        return states[0], model.draft(states, image, tokens, positions, visible, slots)[0]


def contiguous(words: Words) -> list[int]:
    """The conversation as a prompt has it: no gap before the question."""
    row = Sequence(320, words)
    begin_with_pictures(row, SIZE, "You are mini.")
    begun = row.used
    start = row.segment_start
    assert row.exchange(TURNS)
    return [*row.tokens[:begun].tolist(), *row.tokens[start : row.used].tolist()]


def test_every_segment_has_the_references_logits(
    words: Words, model: Model, reference: Any, picture: Tensor
) -> None:
    row = Sequence(384, words)
    begin_with_pictures(row, SIZE, "You are mini.")
    assert row.exchange([Exchange("count", "How many stars are there?", "There are 3 stars.")])
    start = row.segment_start
    assert start % PIECE == 0
    assert start > row.used - PIECE
    assert row.exchange(TURNS)
    end = row.used
    row.talk([Exchange("talk", "Hello", "Hello!")], "")
    states, _ = read(model, row, picture)
    ids = torch.tensor([contiguous(words)])
    patches = patchify(picture, 16, 2).view(-1, 3, 1, 256).expand(-1, -1, 2, -1).reshape(-1, 3 * 2 * 256)
    with torch.no_grad():
        theirs = reference(
            input_ids=ids,
            pixel_values=patches,
            image_grid_thw=torch.tensor([[1, SIZE[1] // 16, SIZE[0] // 16]]),
            mm_token_type_ids=(ids == added_id("<|image_pad|>")).int(),
        ).logits[0]
        alone = reference(
            input_ids=torch.from_numpy(row.tokens[None, -(-end // PIECE) * PIECE : row.used]).long()
        )
        ours = model.logits(states)
    assert float((ours[start:end] - theirs[start - end :]).abs().max()) < 1e-4
    assert float(theirs.abs().max()) > 1
    talk = ours[-(-end // PIECE) * PIECE : row.used]
    assert float((talk - alone.logits[0]).abs().max()) < 1e-4


def test_drafts_are_those_of_the_reference(words: Words, model: Model, reference: Any, folder: Path) -> None:
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    text = reference.config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
    reference.config.name_or_path = str(folder)
    drafter = MtpModel.from_pretrained(reference)
    row = Sequence(64, words)
    row.talk([Exchange("talk", "Hello", "Hello to you, too, whoever you are!")], "")
    length = row.used
    ids = torch.from_numpy(row.tokens[None, :length]).long()
    _, drafts = read(model, row, torch.zeros(1, 3, 64, 64))
    with torch.no_grad():
        states = reference(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        places = torch.arange(1, length)[None]
        cache = MtpCache(config=reference.config.get_mtp_config())
        theirs = drafter.forward_layer(0, states[:, :-1], places, cache, input_ids=ids[:, 1:])
    assert float((drafts[: length - 1] - theirs[0]).abs().max()) < 1e-4


def test_the_chat_template_and_the_training_sequences_are_the_same(words: Words, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages: list[Any] = [
        {"role": "system", "content": "You are mini."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "It is a dog."},
        {"role": "user", "content": [{"type": "text", "text": "Is it?"}]},
    ]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    text = text.replace("<|image_pad|>", "<|image_pad|>" * 88) + "Yes.<|im_end|>"
    assert contiguous(words) == tokenizer(text)["input_ids"]
    row = Sequence(96, words)
    row.begin(words.opening("user"))
    assert row.exchange([Exchange("x", "Is it?", "Yes.")], "Let me see.")
    said = "".join(tokenizer.decode(row.tokens[3:4].tolist() + row.tokens[PIECE : row.used].tolist()))
    asked = tokenizer.apply_chat_template(
        messages[-1:], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    assert said.endswith(f"{asked.partition('user')[2].lstrip()}Let me see.\n</think>\n\nYes.<|im_end|>")


def test_what_fits_is_taken_over_from_mini() -> None:
    model, mini = Model(MINI35), load(PACKAGE)
    assert "million parameters" in take_over(model, PACKAGE)
    learnt, own = mini.state_dict(), model.state_dict()
    seen = [name for name in own if name.startswith(("model.visual.", "model.language_model.embed"))]
    assert len(seen) > 100
    assert all(torch.equal(own[name], learnt[name]) for name in seen)
    # A full layer is mini's, with a gate that is half open and twice the output.
    ours, theirs = model.model.language_model, mini.model.language_model
    states = torch.randn(2, 40, MINI35.hidden, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(3, 2, -1)
    visible = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with torch.no_grad():
        found = ours.layers[3](states, *ours.rotations(positions), visible)
        wanted = theirs.layers[LAYERS[3]](states, *theirs.rotations(positions), visible)
    assert float((found - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())
    # A gated delta net asks, knows and says what the attention does in whose place it stands.
    first, second = (f"model.language_model.layers.1.{name}" for name in ("linear_attn", "self_attn"))
    keys = (
        learnt[f"{second}.k_proj.weight"].unflatten(0, (-1, 64)) * learnt[f"{second}.k_norm.weight"][:, None]
    )
    assert torch.equal(own[f"{first}.in_proj_qkv.weight"][128:256], keys.flatten(0, 1))
    assert torch.equal(own[f"{first}.out_proj.weight"], learnt[f"{second}.o_proj.weight"])


def test_the_kernels_walk_as_pytorch_does() -> None:
    from training.mini.delta_kernels import ScanByTriton

    assert compare(ScanByTriton.apply, "cpu", (2, 7, 2, 16, 16, 32)) < 1e-5
