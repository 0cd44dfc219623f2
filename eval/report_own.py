"""Columns and tables of `agreement.py` on the model's own text: with speculation off, and on beside it."""

from __future__ import annotations

from cells import LOOKAHEADS, Score
from report_tables import Lines
from result_agreement import KNOBS, Row, find, mean

MODES = ("off", "on")
HEAD = "own text, off / on"


def there(result: Row) -> bool:
    return all(f"{part}_own_{mode}" in result for part in ("cells", "capped") for mode in MODES)


def cell(result: Row, score: Score | None, lookahead: str, name: str, budget: str, form: str = ".4f") -> str:
    """`off / on` of one figure of a cell; nothing where it was not read."""
    try:
        rows = [find(result, score, lookahead, f"cells_own_{mode}") for mode in MODES]
    except KeyError:
        return ""
    values = [row[name][budget] for row in rows]
    return " / ".join(format(mean(v) if isinstance(v, list) else v, form) for v in values)


def over_budgets(result: Row, score: Score, lookahead: str, budgets: list[str]) -> str:
    try:
        rows = [find(result, score, lookahead, f"cells_own_{mode}") for mode in MODES]
    except KeyError:
        return ""
    return " / ".join(f"{mean([mean(row['missed'][b]) for b in budgets]):.4f}" for row in rows)


def lookaheads(result: Row, name: str, score: Score, label: str) -> Lines:
    """The lookaheads of one score, every figure `off / on`."""
    budgets = [str(b) for b in result["settings"]["budgets"]]
    most, ratio = budgets[-1], result["settings"]["fetch_ratio"]
    rows = []
    for lookahead in LOOKAHEADS:
        row = [lookahead, *(cell(result, score, lookahead, "missed", b) for b in budgets)]
        row += [cell(result, score, lookahead, "same", b, ".1%") for b in budgets]
        row.append(cell(result, score, lookahead, "entering", most, ".1%"))
        row += [capped(result, score, lookahead, int(b), ratio)[0] for b in budgets]
        rows.append([*row, capped(result, score, lookahead, int(most), ratio)[1]])
    head = ["lookahead", *(f"missed @{b}" for b in budgets), *(f"same @{b}" for b in budgets), f"entering @{most}"]
    head += [*(f"missed @{b} under the cap" for b in budgets), f"blocks fetched @{most}"]
    return f"Lookaheads on the model's own text, speculation off / on, {name}: {label}", head, rows


def capped(result: Row, score: Score, lookahead: str, budget: int, ratio: float) -> tuple[str, str]:
    """`off / on`: missed mass, and blocks fetched a KV head and token."""
    found = []
    for mode in MODES:
        found += [
            row for row in result[f"capped_own_{mode}"]
            if (row["lookahead"], row["budget"], row["fetch_ratio"]) == (lookahead, budget, ratio)
            and all(row[k] == getattr(score, k) for k in KNOBS)
        ]  # fmt: skip
    if len(found) != len(MODES):
        return "", ""
    return tuple(" / ".join(texts) for texts in (
        [f"{mean(row['missed']):.4f}" for row in found], [f"{row['fetched']:.2f}" for row in found],
    ))  # type: ignore[return-value]  # fmt: skip


def runs(rows: list[Row]) -> list[str]:
    """Top-1 agreement and KL, `off / on`, and tokens a forward, of one setting's rows on its own text."""
    found = {row["speculation"]: row for row in rows if row.get("speculation") in ("own", "on") and "kl" in row}
    pair = [found.get(mode) for mode in ("own", "on")]
    told = [" / ".join(format(row[name], form) if row else "-" for row in pair)
            for name, form in (("agreement", ".2%"), ("kl", ".5f"))]  # fmt: skip
    on = pair[1]
    return [*told, f"{on['tokens_a_forward']:.2f}" if on else ""] if found else ["", "", ""]
