"""How messages name several ranks."""

from collections.abc import Collection


def name_ranks(numbers: Collection[int], most: int | None = None, noun: str = "rank") -> str:
    """ "rank 3", "ranks 1, 2 and 5", "ranks 1-7 and 9"; of more than `most` numbers and ranges, the first half of those
    and how many ranks there are besides."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [part for run in runs for part in (map(str, run) if len(run) < 3 else [f"{run[0]}-{run[-1]}"])]
    if most is not None and len(parts) > most:
        shown = parts[: most // 2]
        named = sum(int(part.partition("-")[2] or part) - int(part.partition("-")[0]) + 1 for part in shown)
        parts = [*shown, f"{len(numbers) - named} more"]
    listed = " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    return f"{noun}{'s' if len(numbers) > 1 else ''} {listed}"
