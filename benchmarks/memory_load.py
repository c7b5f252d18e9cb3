"""The most that a server's plan admits, asked of it over HTTP: large pictures, a whole context, all at once.

    ... -m benchmarks.memory_load http://127.0.0.1:8000 --context 6144 --image-tokens 1280 --sequences 4

``benchmarks.memory`` does it to servers of its own. Knows the limits that the server was started with. Does
not know memory.
"""

import argparse
import sys
import threading
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import httpx

from benchmarks.asking import Reply, ask, body, jpeg, new_client, url_of

ANSWER = 16  # tokens of each answer
PATCH = 32  # pixels of the side of what is one token
LARGER = 3  # halves of what is seen
FEW, MANY = 10, 210  # repeated words, to learn how many tokens one has
WORD = "picture "


@dataclass
class Load:
    """``replies`` in the order of their ends, each with what was asked, in words."""

    replies: list[tuple[str, Reply]] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [
            f"{what}: {reply.status} {reply.ended}, {reply.tokens} tokens; {reply.message[:300]}"
            for what, reply in self.replies
            if (reply.status, reply.ended, reply.tokens) != (200, "length", ANSWER)
        ]

    def facts(self) -> dict[str, Any]:
        longest = max((reply.prompt_tokens + reply.tokens for _, reply in self.replies), default=0)
        largest = max((image["tokens"] for _, reply in self.replies for image in reply.seen), default=0)
        seconds = {what: round(reply.seconds, 3) for what, reply in self.replies}
        return {
            "requests": len(self.replies),
            "failures": self.failures,
            "longest": longest,
            "image_tokens": largest,
            "seconds": seconds,
            "words": f"{len(self.replies)} requests, {len(self.failures)} failed; the longest of {longest} "
            f"tokens, the largest picture of {largest}; seconds {seconds}",
        }


def ask_everything(url: str, context: int, image_tokens: int, sequences: int) -> Load:
    """All of it, after each other."""
    load = Load()
    with new_client() as client:
        words = filling(client, url, context, image_tokens, load)
    fill = ("a whole context", about(image_tokens, 1000, words))
    pictures = [
        (f"picture {number} of {sequences} at once", about(image_tokens, number, FEW))
        for number in range(sequences)
    ]
    at_once(url, pictures, load)
    at_once(url, [fill], load)
    others = [(f"{what}, beside a whole context", about(image_tokens, 100 + number, FEW))
              for number, (what, _) in enumerate(pictures[1:])]  # fmt: skip
    at_once(url, [("a whole context beside others", about(image_tokens, 2000, words)), *others], load)
    return load


def filling(client: httpx.Client, url: str, context: int, image_tokens: int, load: Load) -> int:
    """How often ``WORD`` may be said beside the largest picture until the context is full."""
    few = ask(client, url, about(image_tokens, 3000, FEW))
    many = ask(client, url, about(image_tokens, 3000, MANY))
    load.replies += [("few words", few), ("many words", many)]
    each = (many.prompt_tokens - few.prompt_tokens) / (MANY - FEW)
    return FEW + int((context - ANSWER - few.prompt_tokens) / each) if each > 0 else FEW


def about(image_tokens: int, number: int, words: int) -> bytes:
    """A request about a picture that no other has, and that is scaled down to ``image_tokens`` exactly.

    Half as wide again as what is seen of it, and of the most square form that so many tokens have.
    """
    rows = next(rows for rows in range(isqrt(image_tokens), 0, -1) if image_tokens % rows == 0)
    width, height = (LARGER * PATCH * side // 2 for side in (image_tokens // rows, rows))
    return body(
        WORD * words,
        [url_of(jpeg(width, height, number))],
        max_tokens=ANSWER,
        ignore_eos=True,
        temperature=0,
    )


def at_once(url: str, contents: list[tuple[str, bytes]], load: Load) -> None:
    """Each from a client of its own, sent at the same moment."""
    together = threading.Barrier(len(contents))

    def one(what: str, content: bytes) -> None:
        with new_client() as client:
            together.wait()
            load.replies.append((what, ask(client, url, content)))

    threads = [threading.Thread(target=one, args=each) for each in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks a running server for all that its plan admits.")
    parser.add_argument("url", metavar="URL", help="of `vlfit serve`")
    for name in ("context", "image-tokens", "sequences"):
        parser.add_argument(
            f"--{name}", type=int, required=True, metavar="N", help=f"what it was started with as --{name}"
        )
    options = parser.parse_args()
    load = ask_everything(options.url, options.context, options.image_tokens, options.sequences)
    print(load.facts()["words"])
    sys.exit("\n".join(load.failures) or 0)


if __name__ == "__main__":
    main()
