"""Switches: what is accepted, and what the user is told otherwise."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from rolltape.replay.switches import CHOICES, Switches
from rolltape.store import UsageError


def test_without_any_everything_is_as_the_trainer_has_it() -> None:
    assert Switches.parse([]) == Switches()
    assert Switches().as_dict() == {key: values[0] for key, values in CHOICES.items()}


@pytest.mark.parametrize("key", CHOICES)
def test_every_listed_value_is_accepted(key: str) -> None:
    for value in CHOICES[key]:
        assert Switches.parse([f"{key}={value}"]).as_dict()[key] == value


def test_several_at_once() -> None:
    switches = Switches.parse(["routing=ids+weights", "temperature=1", "dtype=float64"])
    assert (switches.routing, switches.temperature, switches.dtype) == (
        "ids+weights",
        "1",
        "float64",
    )
    assert switches.support == "full"


def test_unknown_key_lists_the_switches_that_exist() -> None:
    with pytest.raises(UsageError) as caught:
        Switches.parse(["kernels=batch-invariant"])
    assert "no switch 'kernels'" in str(caught.value)
    for key in CHOICES:
        assert f"{key}=" in str(caught.value)


def test_unknown_value_lists_the_values_that_exist() -> None:
    with pytest.raises(UsageError, match=r"routing=weights.*routing=live\|ids\|ids\+weights"):
        Switches.parse(["routing=weights"])


@pytest.mark.parametrize("item", ["routing", "", "routing ids"])
def test_not_key_value(item: str) -> None:
    with pytest.raises(UsageError, match="not KEY=VALUE"):
        Switches.parse([item])


def test_same_key_twice_is_refused_even_with_one_value() -> None:
    with pytest.raises(UsageError, match="routing is given twice"):
        Switches.parse(["routing=ids", "routing=ids"])


def test_built_in_python_it_is_checked_too() -> None:
    with pytest.raises(UsageError, match="dtype=int8"):
        Switches(dtype="int8")


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Switches().routing = "ids"  # type: ignore[misc]
