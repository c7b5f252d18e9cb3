"""Options of ``vlfit batch``, as they are written and explained, and what is asked by them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlfit.errors import UsageError

if TYPE_CHECKING:
    from vlfit.tasks.batch.ray.options import RayOptions
    from vlfit.tasks.batch.wish import Wish

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="Folders, globs, pictures, .txt lists (one name or URL a line), .tar shards, .parquet tables.",
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Where records go: .jsonl, or .parquet for a folder of them."
    ),
]
Long = Annotated[bool, typer.Option("--long", help="Captions of a paragraph instead of a sentence.")]
Ask = Annotated[str | None, typer.Option("--ask", metavar="QUESTION", help="Answer this about each picture.")]
System = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="With --ask: what to tell the model first.")
]
Scene = Annotated[
    bool, typer.Option("--scene", help="A summary, objects with boxes, and the words on each picture.")
]
Detect = Annotated[
    str | None, typer.Option("--detect", metavar="THINGS", help='Where these are: "cups", "cups, plates".')
]
Schema = Annotated[
    Path | None,
    typer.Option(
        "--schema",
        metavar="FILE",
        help="A JSON schema that each answer must keep to; alone, or for --ask.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        metavar="N",
        help="Pictures that are worked on at once.  [default: as many as fit, at most 8 here]",
    ),
]
Readers = Annotated[
    int | None,
    typer.Option(
        "--readers", metavar="N", help="Threads that read and decode ahead.  [default: one a processor, 2-8]"
    ),
]
Tries = Annotated[
    int | None,
    typer.Option(
        "--tries", metavar="N", help="How often a failure that may pass is tried in all.  [default: 6]"
    ),
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Do not stop when many pictures in a row fail: list them.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", help="Stop after so many pictures of each run.")
]
Ordered = Annotated[bool, typer.Option("--ordered", help="Write records in the order of the pictures.")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Try again what is on the list of failures.")
]
Force = Annotated[bool, typer.Option("--force", help="Go on in an output that another job began.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Count, do the first few without writing, and say how long all take."),
]
Sidecars = Annotated[
    list[str] | None,
    typer.Option(
        "--sidecar",
        metavar="KIND",
        help="Also write each text beside its picture: txt, xmp, xmp-stem (photo.xmp), or into it: exif,"
        " which needs the program exiftool.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="With --sidecar: replace texts that are there already.")
]
Backup = Annotated[
    bool, typer.Option("--backup", help="With --sidecar exif: leave the picture as it was in FILE_original.")
]
KeepTimes = Annotated[
    bool, typer.Option("--keep-times", help="With --sidecar exif: the file keeps its time.")
]
Column = Annotated[
    str | None,
    typer.Option("--column", metavar="NAME", help="Of a .parquet table: the column with the pictures."),
]
Keep = Annotated[
    list[str] | None,
    typer.Option("--keep", metavar="NAME", help="Of a .parquet table: carry this column into the records."),
]
Hidden = Annotated[bool, typer.Option("--hidden", help="Folders: look at names that begin with a dot, too.")]
PrivateUrls = Annotated[
    bool, typer.Option("--allow-private-urls", help="Fetch URLs in the private network, too.")
]
Shard = Annotated[
    str | None,
    typer.Option("--shard", metavar="I/N", help="Only part I of N, for N machines that share the pictures."),
]
Ray = Annotated[
    str | None,
    typer.Option("--ray", metavar="ADDRESS", help="Run on a Ray cluster: host:port, auto, or local."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", help="With --ray: models that run at once.  [default: one a GPU]"),
]


def read_part(shard: str | None) -> str | None:
    """``shard`` as I/N, however it was typed; None for the whole. Raises ``UsageError`` for anything else."""
    from vlfit.tasks.batch.shard import read_shard

    if shard is None:
        return None
    index, of = read_shard(shard)
    return f"{index}/{of}" if (index, of) != (1, 1) else None


def read_cluster(
    ray: str | None, workers: int | None, *, ordered: bool, dry_run: bool
) -> "RayOptions | None":
    """The cluster that was named; None: this machine alone. Raises ``UsageError`` for what does not go with
    the one or the other.
    """
    from vlfit.tasks.batch.ray.options import RayOptions

    if ray is None:
        if workers is not None:
            raise UsageError("--workers goes with --ray", "--concurrency is how many run at once here")
        return None
    if ordered:
        raise UsageError("a cluster keeps no order", "leave out --ordered, or --ray")
    if dry_run:
        raise UsageError("--dry-run tries the first pictures on this machine alone", "leave out --ray")
    return RayOptions(ray, workers)


def read_wish(
    *,
    long: bool,
    ask: str | None,
    system: str | None,
    scene: bool,
    detect: str | None,
    schema: Path | None,
) -> "Wish":
    """What is asked of each picture. Raises ``UsageError`` for two at once, or a schema that is none."""
    from vlfit.tasks.batch.wish import Wish

    typed = {"--long": long, "--ask": ask is not None, "--scene": scene, "--detect": detect is not None}
    typed["--schema"] = schema is not None and ask is None
    both = [name for name, given in typed.items() if given]
    if len(both) > 1:
        raise UsageError(f"{' and '.join(both)} are different tasks", "run one, with an output for each")
    if system is not None and ask is None:
        raise UsageError("--system goes with --ask", "leave it out, or ask something")
    form = _read_schema(schema) if schema is not None else None
    if ask is not None:
        return Wish.ask(ask, system=system or "", schema=form)
    if form is not None:
        return Wish.form(form)
    if scene:
        return Wish.scene()
    if detect is not None:
        return Wish.detect(detect)
    return Wish.caption("long" if long else "short")


def _read_schema(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the schema {path} cannot be read: {error}", "name a file of JSON") from error
