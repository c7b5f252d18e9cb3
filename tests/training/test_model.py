"""The training model is Qwen3-VL: the numbers of the reference, which reads what is exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from training.mini.export import configuration, export, load
from training.mini.model import Model
from training.mini.sequences import Sequence, Words, begin_with_pictures, stack, visible_mask
from training.mini.shape import Shape
from training.mini.teller import Exchange
from training.mini.tokenizer import ADDED, FIRST_ADDED, PACKAGE, VOCABULARY, added_id
from training.mini.vision_model import patchify


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(str(PACKAGE / "tokenizer.json"))


def conversation(words: Words, size: tuple[int, int]) -> Sequence:
    row = Sequence(200, words)
    begin_with_pictures(row, size, "You are mini.")
    assert row.exchange([Exchange("name", "What is this?", "It is a dog."), Exchange("x", "Is it?", "Yes.")])
    return row


def test_logits_equal_the_reference(words: Words, tmp_path: Path) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            # Rounded now, because the export rounds; large enough for every part to matter.
            parameter.copy_((parameter + torch.randn_like(parameter) * 0.03).bfloat16().float())
    export(model.state_dict(), model.shape, tmp_path)
    reference = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    width, height = 352, 256
    row = conversation(words, (width, height))
    layout = stack([row])
    picture = torch.rand(1, 3, height, width) * 2 - 1
    patches = patchify(picture, 16, 2).view(-1, 3, 1, 256).expand(-1, -1, 2, -1).reshape(-1, 3 * 2 * 256)
    ids = torch.from_numpy(layout.tokens).long()
    with torch.no_grad():
        states = model(
            picture,
            ids,
            torch.from_numpy(layout.positions).long(),
            visible_mask(torch.from_numpy(layout.segments).long()),
            torch.from_numpy(layout.slots).long(),
        )
        ours = model.logits(states)[0, : row.used]
        theirs = reference(
            input_ids=ids[:, : row.used],
            pixel_values=patches,
            image_grid_thw=torch.tensor([[1, height // 16, width // 16]]),
            attention_mask=torch.ones_like(ids[:, : row.used]),
            mm_token_type_ids=(ids[:, : row.used] == added_id("<|image_pad|>")).int(),
        ).logits[0]
    assert float((ours - theirs).abs().max()) < 1e-4
    assert float(theirs.abs().max()) > 1


def test_segments_do_not_see_each_other(words: Words) -> None:
    torch.manual_seed(0)
    model = Model(Shape(vision_depth=3, deepstack=(0, 1), depth=2))
    answers = []
    for others in ([], [Exchange("count", "How many stars are there?", "There are 3 stars.")]):
        row = Sequence(160, words)
        begin_with_pictures(row, (256, 256))
        for exchange in others:
            row.exchange([exchange])
        start = row.used
        row.exchange([Exchange("name", "What is this?", "It is a dog.")])
        row.talk([Exchange("talk", "Hello", "Hello!")], "")
        layout = stack([row])
        picture = torch.linspace(-1, 1, 3 * 256 * 256).view(1, 3, 256, 256)
        with torch.no_grad():
            states = model(
                picture,
                torch.from_numpy(layout.tokens).long(),
                torch.from_numpy(layout.positions).long(),
                visible_mask(torch.from_numpy(layout.segments).long()),
                torch.from_numpy(layout.slots).long(),
            )
        answers.append(states[0, start : row.used])
    assert torch.allclose(answers[0], answers[1], atol=1e-5)


def test_the_export_can_be_read_back_and_its_shards_are_small(tmp_path: Path) -> None:
    model = Model()
    export(model.state_dict(), model.shape, tmp_path)
    again = load(tmp_path).state_dict()
    assert all(
        torch.equal(again[name], value.bfloat16().float()) for name, value in model.state_dict().items()
    )
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert max(path.stat().st_size for path in shards) < 16 * 2**20


def test_the_shipped_checkpoint_is_the_one_described() -> None:
    assert json.loads((PACKAGE / "config.json").read_text()) == configuration(Shape())
    assert sum(parameter.numel() for parameter in load(PACKAGE).parameters()) == 12_300_864
    assert sum(path.stat().st_size for path in PACKAGE.iterdir()) < 26_000_000


def test_token_ids(words: Words) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PACKAGE / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert [tokenizer.token_to_id(token) for token in ADDED] == list(range(FIRST_ADDED, VOCABULARY))
    text = 'A red square, 42 and "STOP" – 狗 🐶\n```json\n[{"bbox_2d": [1, 23, 456, 1000]}]\n```'
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(words.pieces("1000")) == 4


def test_the_chat_template_and_the_training_sequences_are_the_same(words: Words) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PACKAGE)
    messages: list[Any] = [
        {"role": "system", "content": "You are mini."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "It is a dog."},
        {"role": "user", "content": [{"type": "text", "text": "Is it?"}]},
        {"role": "assistant", "content": "Yes."},
    ]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    text = text.replace("<|image_pad|>", "<|image_pad|>" * 88).removesuffix("\n")
    row = conversation(words, (352, 256))
    assert row.tokens[: row.used].tolist() == tokenizer(text)["input_ids"]


def test_words_that_were_read_are_spelled(words: Words) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PACKAGE / "tokenizer.json"))
    for text, spelled in (
        ('It says "through".', "through"),
        ('A dog and the word "Kitchen" on a red background.', "Kitchen"),
        ('```json\n{"summary": "The word \\"STOP\\" on red.", "text": ["STOP"]}\n```', "STOPSTOP"),
    ):
        ids = words.answer(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        letters = [token for token in ids if tokenizer.decode([token]) in set(spelled)]
        assert "".join(tokenizer.decode([token]) for token in letters) == spelled
    assert words.answer("It is a dog.") == words.pieces("It is a dog.")
