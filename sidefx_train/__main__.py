"""``python -m sidefx_train doctor`` checks the installation, ``cache --list`` lists what is cached on disk."""

from __future__ import annotations

import argparse
import sys
import time

from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

from sidefx_train import disk_cache
from sidefx_train.doctor import doctor


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sidefx_train", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    files = commands.add_parser("cache", help="compiled graphs and measurements cached between processes")
    what = files.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list the entries (the default)")
    what.add_argument("--clear", action="store_true", help="remove all entries")
    commands.add_parser("doctor", help="describe the installation and run a small step on each backend")
    args = parser.parse_args(argv)
    console = Console()
    if args.command == "doctor":
        return 0 if doctor(console) else 1
    return _cache(args.clear, console)


def _cache(clear: bool, console: Console) -> int:
    if clear:
        freed = disk_cache.clear()
        console.print(f"{decimal(freed)} freed in {disk_cache.cache_dir()}", highlight=False, soft_wrap=True)
        return 0
    known = disk_cache.entries()
    table = Table("kind", "what", Column("size", justify="right"), "last used", title_justify="left")
    for entry in known:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        table.add_row(entry.kind, entry.label, decimal(entry.size), used)
    total, limit = sum(entry.size for entry in known), disk_cache.limit_bytes()
    if known:
        console.print(table)
    console.print(
        f"{len(known)} entries, {decimal(total)} of {decimal(limit)} in {disk_cache.cache_dir()}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
