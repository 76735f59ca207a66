"""graphscale doctor: the runtimes and extras of this installation, and the commands to mend or extend it."""

from __future__ import annotations

from collections.abc import Mapping

from graphscale.cli.show import make_console, make_table, print_json, say, show_rows

__all__ = ["doctor"]


def doctor() -> int:
    """Show the installed ONNX Runtime, the targets that run here, and the extras, with the commands to install more.

    Exit code 1 if the installation is broken, such as by two builds of ONNX Runtime over each other.

    Examples:
        graphscale doctor
        graphscale doctor --json
    """
    from graphscale.cli.installation import examine

    found = examine()
    print_json(found.to_dict)
    providers = [reason or name for name, reason in found.providers.items()]
    show_rows(
        [
            ("graphscale", [f"{found.graphscale} in {found.location}"]),
            ("Python", [f"{found.python} on {found.platform}: {found.executable}"]),
            ("runtime", _versions(found.runtimes) or ["none"]),
            ("providers", providers or ["none"]),
        ]
    )
    targets = make_table("opset", "IR version", left="target")
    targets.add_column("runs here", overflow="fold")
    for name, runs in found.targets.items():
        versions = (f"{first} to {last}" for first, last in (runs.opset, runs.ir_version))
        targets.add_row(name, *versions, f"no: needs {runs.lacks}" if runs.lacks else "yes")
    extras = make_table(left="extra")
    extras.add_column("installed", overflow="fold")
    for name, extra in found.extras.items():
        missing = f"no: needs {', '.join(extra.missing)}" if extra.missing else ""
        extras.add_row(name, missing or ", ".join(_versions(extra.installed)))
    for table in (targets, extras):
        say()
        make_console().print(table)
    say()
    for problem in found.problems:
        say(("broken: ", "bold red"), problem)
    if not found.problems:
        say(("nothing is broken", "green"))
    for purpose, command in found.advice.items():
        say((f"for {purpose}: ", "bold"), command)
    return int(bool(found.problems))


def _versions(versions: Mapping[str, str]) -> list[str]:
    return [f"{name} {number}" for name, number in versions.items()]
