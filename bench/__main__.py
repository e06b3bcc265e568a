"""Find the benchmark, run it, print its one JSON line last."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from types import ModuleType

import bench
from bench import common


def benchmarks() -> dict[str, ModuleType]:
    """Every benchmark by name."""
    found = {}
    for info in sorted(pkgutil.iter_modules(bench.__path__), key=lambda i: i.name):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"bench.{info.name}")
        if hasattr(module, "NAME"):
            found[module.NAME] = module
    return found


def main(arguments: list[str]) -> int:
    """Run one benchmark; exit status 0 when it ran."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=bench.__doc__)
    parser.add_argument("--list", action="store_true", help="only print the benchmarks' names")
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    modules = benchmarks()
    for name, module in modules.items():
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        sub.add_argument("--quick", action="store_true", help="about a minute, for not breaking")
        sub.add_argument("--json", action="store_true", help="the JSON line alone on stdout")
        module.add_arguments(sub)
    args = parser.parse_args(arguments)
    if args.list:
        print("\n".join(modules))
        return 0
    if not args.name:
        parser.error(f"name a benchmark: {', '.join(modules)}")
    common.use_stdout(not args.json)
    facts = {"bench": args.name, "commit": common.commit(), "machine": common.machine_facts()}
    result = modules[args.name].run(args)
    if result.get("noisy"):
        common.say(f"Noisy: repeated runs of the same thing differ by {result['spread']:.1%}.")
    print(common.json_line({**facts, **result}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
