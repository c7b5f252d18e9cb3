"""An output belongs to one job, and to one run at a time; its list of failures is accurate."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tasks.batch.beside import item
from vlfit.api.sampling_params import SamplingParams
from vlfit.errors import CannotWrite, DoesNotFit, NotAPicture, UsageError
from vlfit.tasks.batch.items import Item, Record
from vlfit.tasks.batch.job import Job, Wish
from vlfit.tasks.batch.output import Output


def job(tmp_path: Path, wish: Wish | None = None, sampling: SamplingParams | None = None) -> Job:
    return Job(
        wish or Wish.caption(), sampling or SamplingParams(stop=("x",)), ("p",), tmp_path / "out.jsonl"
    )


def done(output: Output, key: str) -> None:
    output.write(item(key), {"key": key, "text": "words"})


def failed_keys(output: Output) -> list[str]:
    if not output.failed_path.exists():
        return []
    return [json.loads(line)["key"] for line in output.failed_path.read_text().splitlines()]


def test_what_is_done_or_failed_is_known_to_the_next_run(tmp_path: Path) -> None:
    first = Output(job(tmp_path))
    first.begin("mini")
    done(first, "a")
    done(first, "a")
    first.record_failure(item("b"), NotAPicture("b is text", "give a picture"), 1)
    first.close()
    assert first.failed == 1
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    second = Output(job(tmp_path))
    assert (second.done_before, second.failed_before) == (1, 1)
    assert [second.is_settled(key) for key in "abc"] == [True, True, False]
    assert len(second.settled_hashes()) == 2
    second.close()
    facts = json.loads(second.failed_path.read_text())
    assert (facts["code"], facts["reason"], facts["tries"]) == ("invalid_image", "b is text", 1)


def test_a_list_of_failures_has_each_key_once_and_no_key_that_was_done_since(tmp_path: Path) -> None:
    first = Output(job(tmp_path))
    first.begin("mini")
    for key in "abc":
        first.record_failure(item(key), DoesNotFit(f"{key} is large", ""), 1)
    first.close()
    again = Output(job(tmp_path), again=True)
    assert not again.is_settled("a")
    done(again, "a")
    again.record_failure(item("b"), DoesNotFit("still large", ""), 2)
    again.close()
    assert again.failed == 2
    assert failed_keys(again) == ["c", "b"]
    assert "still large" in again.failed_path.read_text()
    last = Output(job(tmp_path), again=True)
    done(last, "b")
    done(last, "c")
    last.close()
    assert last.failed == 0
    assert not last.failed_path.exists()


def test_an_output_of_another_job_is_refused_in_words(tmp_path: Path) -> None:
    first = Output(job(tmp_path))
    first.begin("mini")
    done(first, "a")
    first.close()
    Output(job(tmp_path)).close()
    with pytest.raises(UsageError, match=r"task.*'caption'.*'ask'"):
        Output(job(tmp_path, Wish.ask("What is this?")))
    with pytest.raises(UsageError, match=r"max_tokens.*None.*\b3\b"):
        Output(job(tmp_path, sampling=SamplingParams(max_tokens=3, stop=("x",))))
    other = Output(job(tmp_path))
    with pytest.raises(UsageError, match=r"model.*'mini'.*'maxi'"):
        other.begin("maxi")
    other.close()
    forced = Output(job(tmp_path, Wish.ask("What is this?")), force=True)
    forced.begin("maxi")
    assert forced.is_settled("a")
    forced.close()
    with pytest.raises(UsageError, match=r"task.*'ask'"):
        Output(job(tmp_path))


def test_a_field_that_a_version_brought_is_no_other_job(tmp_path: Path) -> None:
    first = Output(job(tmp_path))
    first.begin("mini")
    done(first, "a")
    first.close()
    header = tmp_path / "out.jsonl.job.json"
    facts = json.loads(header.read_text())
    del facts["sampling"]["loop_guard"]
    header.write_text(json.dumps({**facts, "former": 1}))
    Output(job(tmp_path)).close()


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("my diary")
    with pytest.raises(UsageError, match=r"out\.jsonl.*\n.*--force"):
        Output(job(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    for mine in ("my diary", '{"my": "first"}\n{"key": "unfin', '{"key": "a"}\n{"my": "unfin'):
        (tmp_path / "out.jsonl").write_text(mine)
        with pytest.raises(UsageError, match=r"line \d of .*out\.jsonl"):
            Output(job(tmp_path), force=True)
        assert (tmp_path / "out.jsonl").read_text() == mine
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_two_runs_refuse_each_other(tmp_path: Path) -> None:
    first = Output(job(tmp_path))
    with pytest.raises(UsageError, match=r"\bout\.jsonl\b"):
        Output(job(tmp_path))
    first.close()
    Output(job(tmp_path)).close()


def test_a_run_that_ended_before_its_first_word_is_no_job(tmp_path: Path) -> None:
    Output(job(tmp_path)).close()
    Output(job(tmp_path, Wish.scene())).close()
    assert not [*tmp_path.iterdir()]
    (tmp_path / "out.jsonl.job.json").touch()  # as a kill leaves it
    Output(job(tmp_path, Wish.scene())).close()
    Output(replace(job(tmp_path), output=tmp_path / "new" / "out.jsonl")).close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.job.json"]


def test_a_refused_table_stays_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    waiting = tmp_path / "out.parquet" / "_waiting-00000.jsonl"
    waiting.parent.mkdir()
    waiting.write_text('{"key": "a"}\n{"my": "own"}\n')
    with pytest.raises(UsageError, match="line 2 "):
        Output(replace(job(tmp_path), output=waiting.parent), force=True)
    assert waiting.read_text() == '{"key": "a"}\n{"my": "own"}\n'


class Cards:
    """A sidecar that cannot be written for the keys in ``bad``."""

    def __init__(self, bad: str) -> None:
        self.bad = bad
        self.written: list[str] = []
        self.cleaned: list[str] = []

    def write(self, item: Item, record: Record) -> None:
        if item.key in self.bad:
            raise CannotWrite(f"cannot write {item.key}.txt", "")
        self.written.append(item.key)

    def clean(self, item: Item) -> None:
        self.cleaned.append(item.key)

    def notes(self) -> list[str]:
        return []


def test_a_sidecar_that_fails_costs_no_words_and_is_said(tmp_path: Path) -> None:
    cards = Cards("b")
    output = Output(job(tmp_path), sidecars=[cards])
    for key in "abc":
        done(output, key)
    output.close()
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record.get("sidecar_error") for record in records] == [None, "cannot write b.txt", None]
    assert (cards.written, output.without_sidecar) == (["a", "c"], 1)


def test_nothing_unfinished_stays_beside_a_picture_that_fails(tmp_path: Path) -> None:
    cards = Cards("")
    output = Output(job(tmp_path), sidecars=[cards])
    output.record_failure(Item("a", lambda: b""), NotAPicture("it is none"), 1)
    output.close()
    assert cards.cleaned == ["a"]


def test_sidecars_that_all_fail_stop_the_run(tmp_path: Path) -> None:
    keys = [chr(letter) for letter in range(97, 123)]
    output = Output(job(tmp_path), sidecars=[Cards("".join(keys))])
    for key in keys[:16]:
        done(output, key)
    with pytest.raises(CannotWrite):
        done(output, keys[16])
    output.close()
