"""Print docs/config.md from the dataclasses: `python scripts/docs/config_reference.py > docs/config.md`."""

from collections.abc import Iterable

from jaxdist import registry
from jaxdist.config.entries import options_of
from jaxdist.config.rules.fields import Key, all_keys, is_list, keys, show
from jaxdist.config.schema import Config

HEAD = """# Configuration reference

Made by `scripts/docs/config_reference.py` from `jaxdist/config/schema.py`; change the dataclasses, not this page.

A configuration is a YAML file of sections. Every key has a default, so a file holds only what differs; on the command
line, `section.key=value` goes on top of the file. Numbers are written plainly (`3e-3`), without quotes. `null` stands
for "not set". Anchors, tags, `${...}` and a second document are refused, and so are files of more than 64 KiB.

Where a key names an entry (a model, a data source, ...), the section has the keys of that entry too. They are listed
below it; for entries of your own see [extending.md](extending.md).
"""


def table(found: Iterable[tuple[str, Key]]) -> list[str]:
    """The lines of a Markdown table of keys, by their dotted names."""
    lines = ["| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    for dotted, key in found:
        if not key.nested:
            kind = "list" if is_list(key.kind) else key.kind.__name__
            kind += " or list" if key.rule.listed else " or bool" if key.rule.switch else ""
            kind += " or null" if key.optional else ""
            allowed = key.rule.allowed(key.kind, key.optional)
            lines.append(f"| `{dotted}` | {kind} | `{show(key.default)}` | {allowed} | {key.rule.doc} |")
    return [*lines, ""]


def reference() -> str:
    """The page as Markdown, one table a section, and one each entry that adds keys to it."""
    lines = [HEAD]
    for name, section in keys(Config).items():
        lines += [f"## {name}", "", (section.kind.__doc__ or "").strip(), ""]
        lines += table(all_keys(section.kind, f"{name}."))
        for dotted, key in all_keys(section.kind, f"{name}."):
            for entry in registry.names(key.rule.folder) if key.rule.folder else ():
                for options in options_of(key.rule.folder, entry):
                    common, prefix = keys(section.kind), dotted.rpartition(".")[0]
                    own = [
                        (f"{prefix}.{each}", key)
                        for each, key in all_keys(options)
                        if each.partition(".")[0] not in common
                    ]
                    lines += [f"### {dotted}: {entry}", "", (options.__doc__ or "").strip(), "", *table(own)]
    return "\n".join(lines)


if __name__ == "__main__":
    print(reference(), end="")
