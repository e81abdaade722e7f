"""`optim_args`: items, types, and what a mistake is answered with."""

from __future__ import annotations

from typing import Literal

import pytest

from flashoptim_hf.errors import ConfigurationError
from flashoptim_hf.trainer.options import option_types, parse_optim_args


class Example:
    """A signature with every kind of option."""

    def __init__(
        self,
        params: list[object],
        lr: float | dict[str, float] = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        codec: str = "log",
        master_bits: int | None = 24,
        page_bytes: int | str = "32MiB",
        dither: bool = True,
        scales: tuple[float, ...] = (),
        mode: Literal["a", "b", 3] = "a",
        hook: dict[str, str] | None = None,
        **other: object,
    ) -> None: ...


TYPES = option_types(Example)

GOOD = [
    (None, {}),
    ("", {}),
    (" ", {}),
    ("codec=log,", {"codec": "log"}),
    (" codec = log , dither = no ", {"codec": "log", "dither": False}),
    ("lr=1e-6", {"lr": 1e-6}),
    ("lr=1", {"lr": 1.0}),
    ("betas=(0.9,0.95)", {"betas": (0.9, 0.95)}),
    ("betas=(0.9, 0.95),codec=none", {"betas": (0.9, 0.95), "codec": "none"}),
    ("betas=[0.9, 0.95]", {"betas": (0.9, 0.95)}),
    ("betas=(0.9, 0.95,)", {"betas": (0.9, 0.95)}),
    ("betas=0.9:0.95", {"betas": (0.9, 0.95)}),
    ("scales=1:2:3", {"scales": (1.0, 2.0, 3.0)}),
    ("scales=(7)", {"scales": (7.0,)}),
    ("master_bits=32", {"master_bits": 32}),
    ("master_bits=None", {"master_bits": None}),
    ("page_bytes=32MiB", {"page_bytes": "32MiB"}),
    ("page_bytes=4096", {"page_bytes": 4096}),
    ("mode=3", {"mode": 3}),
    ("hook=none", {"hook": None}),
    ("codec='a,b'", {"codec": "a,b"}),
    ("codec=a=b", {"codec": "a=b"}),
    *((f"dither={word}", {"dither": True}) for word in ("true", "True", "1", "yes", "on")),
    *((f"dither={word}", {"dither": False}) for word in ("false", "False", "0", "no", "off")),
]


@pytest.mark.parametrize(("text", "expected"), GOOD)
def test_values_get_the_type_of_the_signature(text: str | None, expected: dict[str, object]) -> None:
    parsed = parse_optim_args(text, TYPES, "example")
    assert parsed == expected
    assert {key: type(value) for key, value in parsed.items()} == {key: type(value) for key, value in expected.items()}


BAD = [
    ("a==1", "'a==1' is malformed"),
    ("codec==log", "'codec==log' is malformed"),
    ("codec", "'codec' is malformed"),
    ("codec=", "'codec=' is malformed"),
    ("=log", "'=log' is malformed"),
    ("codec=log,,dither=no", "'' is malformed"),
    ("betas=0.9,0.95", "betas='0.9' must be 2 numbers, written (a,b) or a:b"),
    ("betas=(0.9,0.95", "')' is missing after 'betas=(0.9,0.95'"),
    ("codec='log", '"\'" is missing'),
    ("betas=(0.9)", "must be 2 numbers"),
    ("betas=(0.9,x)", "must be 2 numbers"),
    ("lr=fast", "lr='fast' must be a number."),
    ("dither=maybe", "dither='maybe' must be true or false."),
    ("dither=2", "must be true or false"),
    ("master_bits=24.5", "must be none or a whole number"),
    ("master_bits=true", "must be none or a whole number"),
    ("mode=c", "must be a or b or 3"),
    ("hook=x", "must be none"),
    ("typo_key=1", "example has no option 'typo_key'"),
    ("beta1=0.8", "Did you mean betas?"),
    ("page-bytes=1MiB", "Did you mean page_bytes?"),
    ("codec=log,codec=none", "'codec=none': codec is given twice"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_mistake_names_the_item(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_optim_args(text, TYPES, "example")
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["typo_key=1", "codec", "a==1"])
def test_a_mistake_lists_what_is_known(text: str) -> None:
    with pytest.raises(ConfigurationError, match="lr, betas, codec, master_bits, page_bytes, dither, scales, mode, hook"):
        parse_optim_args(text, TYPES, "example")


def test_a_mapping_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(ConfigurationError, match=r"is a dict, but must be a string.*codec=log"):
        parse_optim_args({"codec": "log"}, TYPES, "example")  # type: ignore[arg-type]


def test_options_are_all_but_the_parameters() -> None:
    assert list(TYPES) == ["lr", "betas", "codec", "master_bits", "page_bytes", "dither", "scales", "mode", "hook"]
