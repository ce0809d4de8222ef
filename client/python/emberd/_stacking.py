"""Which tables may share a stack: it has one set of hyper-parameters, where users speak of those of tables."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

from .config import StackGroup


def apart(rates: Mapping[str, Any], kinds: Mapping[str, Any]) -> List[StackGroup]:
    """Groups of a plan in which no tables share a stack whose rates may come to differ, though they are declared alike.

    rates: by table, what gives its rate in each step, such as a schedule; None: it is as declared.
    kinds: by table, its `kind_of`."""
    first: Dict[Any, Any] = {}
    mixed = {kinds[table] for table, rate in rates.items() if first.setdefault(kinds[table], rate) != rate}
    return [StackGroup([table]) for table, rate in rates.items() if rate is not None and kinds[table] in mixed]


def kind_of(columns: int, optimizer: Any) -> Any:
    """What those tables have in common that may be stacked: the width with padding, and the kind of optimizer."""
    return -(-columns // 8), type(optimizer)


def unequal(values: Mapping[str, Any], stacks: Mapping[str, Any]) -> Optional[Tuple[str, str]]:
    """Two tables of one stack with different values; None: there are none. Both by table."""
    first: Dict[Any, str] = {}
    for table in values:
        one = first.setdefault(stacks[table], table)
        if values[one] != values[table]:
            return one, table
    return None
