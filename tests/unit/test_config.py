"""The configuration: validated when written down, resolved once, every choice listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.config import (
    PHASES,
    Choice,
    GraphConfig,
    GraphSupport,
    PhaseConfig,
    PhaseFacts,
    ResolvedConfig,
    parse_bytes,
    resolve,
)
from segue.errors import ConfigError, StrictModeError
from segue.shapes import sglang_decode, sglang_prefill, vllm_decode
from segue.shapes.key import Phase

ENGINE: Mapping[Phase, PhaseFacts] = {"decode": PhaseFacts(max_size=256), "prefill": PhaseFacts(max_size=2048)}


def settled(
    config: GraphConfig | None = None,
    phases: Mapping[Phase, PhaseFacts] = ENGINE,
    device_type: str = "cuda",
    support: GraphSupport = GraphSupport.ALWAYS,
) -> ResolvedConfig:
    return resolve(config or GraphConfig(), phases=phases, device_type=device_type, support=support)


def find(resolved: ResolvedConfig, phase: Phase, field: str) -> Choice:
    return next(choice for choice in resolved.choices if (choice.phase, choice.field) == (phase, field))


def test_the_defaults_on_cuda_are_full_decode_and_breakable_prefill_on_the_presets() -> None:
    resolved = settled()
    decode, prefill = resolved.phase("decode"), resolved.phase("prefill")
    assert (decode.backend, decode.ladder) == ("full", sglang_decode(256))
    assert (prefill.backend, prefill.ladder) == ("breakable", sglang_prefill(2048))
    assert (decode.max_padding, decode.num_warmups, decode.on_failure) == (2.0, 1, "raise")
    assert {(c.phase, c.field, c.kind) for c in resolved.choices} == {
        (phase, field, "auto") for phase in ("decode", "prefill") for field in ("backend", "ladder")
    }


def test_the_defaults_on_cpu_are_short_and_leave_no_gap_between_rungs() -> None:
    phases: Mapping[Phase, PhaseFacts] = {"decode": PhaseFacts(max_size=8), "prefill": PhaseFacts(max_size=256)}
    resolved = settled(phases=phases, device_type="cpu")
    assert resolved.phase("decode").ladder == (1, 2, 4, 8)
    assert resolved.phase("prefill").ladder == (16, 64, 256)
    assert resolved.phase("prefill").max_padding == 4.0
    assert find(resolved, "prefill", "max_padding").asked == "2.0"


def test_a_backend_name_stands_for_a_phase_config() -> None:
    assert GraphConfig(decode="breakable").decode == PhaseConfig(backend="breakable")
    assert GraphConfig(decode="breakable") == GraphConfig(decode=PhaseConfig(backend="breakable"))


def test_off_disables_every_phase() -> None:
    config = GraphConfig.off()
    assert {config.phase(phase).backend for phase in PHASES} == {"disabled"}
    resolved = settled(config, support=GraphSupport.NEVER)
    assert [(phase.backend, phase.ladder) for phase in resolved.phases] == [("disabled", ())] * 2
    assert resolved.choices == ()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PhaseConfig(backend="fast"), "backend is 'fast'.*breakable"),
        (lambda: PhaseConfig(compiler="gcc"), "compiler is 'gcc'.*inductor.*eager"),
        (lambda: GraphConfig(decode="fast"), "decode.*'fast'"),
        (lambda: GraphConfig(decode=3), "decode is 3"),  # type: ignore[arg-type]
        (lambda: PhaseConfig(ladder="trt"), "ladder is 'trt'.*sglang.*vllm"),
        (lambda: PhaseConfig(ladder=(4, 0)), "0"),
        (lambda: PhaseConfig(ladder=7), "ladder is 7"),  # type: ignore[arg-type]
        (lambda: PhaseConfig(max_size=0), "max_size is 0.*at least 1"),
        (lambda: PhaseConfig(request_slots=-1), "request_slots is -1.*at least 1"),
        (lambda: PhaseConfig(max_padding=0.5), "max_padding is 0.5.*1.0"),
        (lambda: PhaseConfig(max_padding=float("nan")), "max_padding is nan.*1.0"),
        (lambda: PhaseConfig(num_warmups=-1), "num_warmups is -1.*at least 0"),
        (lambda: PhaseConfig(on_failure="hope"), "on_failure is 'hope'.*shrink"),  # type: ignore[arg-type]
        (lambda: GraphConfig(capture="never"), "capture is 'never'.*lazy"),  # type: ignore[arg-type]
        (lambda: GraphConfig(debug="all"), "debug is 'all'.*ops"),  # type: ignore[arg-type]
        (lambda: GraphConfig(strict="yes"), "strict is 'yes'"),  # type: ignore[arg-type]
        (lambda: GraphConfig(lend_pool="yes"), "lend_pool is 'yes'"),  # type: ignore[arg-type]
        (lambda: GraphConfig(memory_budget="lots"), "memory_budget is 'lots'.*2GiB"),
        (lambda: PhaseFacts(max_size=0), "max_size is 0"),
        (lambda: settled(device_type="mps"), "device_type is 'mps'.*cuda"),
        (lambda: settled().phase("denoise"), "denoise.*prefill, decode"),
    ],
)
def test_an_invalid_setting_names_field_value_and_what_is_allowed(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


@pytest.mark.parametrize("value", [PhaseConfig(), GraphConfig(), settled(), settled().phase("decode")])
def test_a_setting_cannot_be_changed_afterwards(value: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, "full")


def test_a_full_graph_that_attention_never_supports_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"decode.backend is 'full'.*NEVER.*breakable"):
        settled(GraphConfig(decode="full"), support=GraphSupport.NEVER)


def test_an_automatic_full_graph_is_downgraded_with_the_reason() -> None:
    resolved = settled(support=GraphSupport.NEVER)
    choice = find(resolved, "decode", "backend")
    assert resolved.phase("decode").backend == "breakable"
    assert (choice.asked, choice.got, choice.kind) == ("auto", "breakable", "downgrade")
    assert "NEVER" in choice.why and "UNIFORM_SINGLE_TOKEN_DECODE" in choice.why


@pytest.mark.parametrize(
    ("phase", "width", "least"),
    [
        ("decode", 1, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("draft_decode", 1, GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE),
        ("target_verify", 4, GraphSupport.UNIFORM_BATCH),
        ("draft_extend", 4, GraphSupport.UNIFORM_BATCH),
        ("prefill", 1, GraphSupport.ALWAYS),
        ("draft_prefill", 1, GraphSupport.ALWAYS),
        ("denoise", 1, GraphSupport.NEVER),
        ("call", 1, GraphSupport.NEVER),
    ],
)
def test_a_full_graph_needs_what_its_batches_look_like(phase: Phase, width: int, least: GraphSupport) -> None:
    config = GraphConfig(**{phase: "full"})  # type: ignore[arg-type]
    for support in GraphSupport:
        if support is GraphSupport.NEVER and least > support:
            continue
        resolved = settled(config, {phase: PhaseFacts(max_size=64, width=width)}, support=support)
        is_full = resolved.phase(phase).backend == "full"
        assert is_full == (support >= least)
        assert any(choice.is_downgrade for choice in resolved.choices) != is_full


def test_strict_mode_refuses_a_downgrade_and_nothing_else() -> None:
    assert settled(GraphConfig(strict=True)).strict
    with pytest.raises(StrictModeError, match=r"prefill.backend: full -> breakable"):
        settled(GraphConfig(strict=True, prefill="full"), support=GraphSupport.UNIFORM_BATCH)


def test_full_prefill_says_that_it_is_experimental_and_gets_request_slots() -> None:
    resolved = settled(GraphConfig(prefill="full"))
    notice = find(resolved, "prefill", "backend")
    assert notice.kind == "notice"
    assert "experimental" in notice.why and "breakable" in notice.why
    assert resolved.phase("prefill").request_slots == 4  # 2,048 / 512
    nine = GraphConfig(prefill=PhaseConfig(backend="full", request_slots=9))
    assert settled(nine).phase("prefill").request_slots == 9
    assert settled().phase("prefill").request_slots is None
    small: Mapping[Phase, PhaseFacts] = {"prefill": PhaseFacts(max_size=256)}
    assert settled(GraphConfig(prefill="full"), small).phase("prefill").request_slots == 1


def test_ladders_can_be_named_listed_and_capped() -> None:
    def ladder(**options: Any) -> tuple[int, ...]:
        return settled(GraphConfig(decode=PhaseConfig(**options))).phase("decode").ladder

    assert ladder(ladder="vllm") == vllm_decode(256)
    assert ladder(max_size=10) == (1, 2, 4, 8, 10)
    assert ladder(ladder=[8, 1, 8]) == (1, 8, 256)
    assert ladder(ladder=[8, 1], max_size=8) == (1, 8)
    assert ladder(ladder=[8, 1], max_size=16) == (1, 8, 16)
    assert ladder(ladder=[8, 1, 300]) == (1, 8, 256)
    assert ladder(ladder=[300]) == (256,)
    prefill = settled(GraphConfig(prefill=PhaseConfig(ladder="sglang", max_size=512))).phase("prefill")
    assert prefill.ladder == sglang_prefill(512)


def test_what_cannot_be_done_as_asked_is_listed() -> None:
    resolved = settled(
        GraphConfig(decode=PhaseConfig(max_size=4096), prefill=PhaseConfig(ladder=(64, 4096)), draft_decode="full")
    )
    assert (find(resolved, "decode", "max_size").asked, find(resolved, "decode", "max_size").got) == ("4096", "256")
    assert find(resolved, "prefill", "ladder").got == "64,2048"
    assert find(resolved, "draft_decode", "backend").got == "unused"


def test_phases_without_a_ladder_capture_exact_shapes() -> None:
    resolved = settled(phases={"denoise": PhaseFacts(max_size=1, default_backend="breakable")})
    assert (resolved.phase("denoise").backend, resolved.phase("denoise").ladder) == ("breakable", ())
    assert "exact shapes" in resolved.explain()


def test_explain_shows_every_phase_and_every_choice_in_columns() -> None:
    resolved = settled(GraphConfig(memory_budget="1.5GiB"), support=GraphSupport.NEVER)
    lines = resolved.explain().splitlines()
    assert len(lines) == 1 + len(resolved.phases) + len(resolved.choices)
    assert "memory budget 1.50 GiB" in lines[0]
    for choice, line in zip(resolved.choices, lines[3:]):
        assert line.split()[:3] == [choice.kind, choice.phase, choice.field]
        assert line.endswith(choice.why)
    assert lines[1].index("rungs") == lines[2].index("rungs")
    assert len({line.index(choice.why) for choice, line in zip(resolved.choices, lines[3:])}) == 1


def test_resolving_twice_gives_the_same() -> None:
    assert settled() == settled()
    assert settled().choices == settled().choices


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (123, 123),
        ("123", 123),
        ("2GiB", 2147483648),
        ("512MiB", 536870912),
        ("1.5 GB", 1500000000),
        ("64kb", 64000),
        ("1TiB", 1099511627776),
        (" 7 B ", 7),
    ],
)
def test_bytes_are_read_as_written(text: int | str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2 gigs", "1e9", 0, -5, True, "0MB", 2.5])
def test_other_text_is_not_a_number_of_bytes(text: Any) -> None:
    with pytest.raises(ConfigError, match="memory_budget is"):
        GraphConfig(memory_budget=text)


@given(amount=st.integers(1, 4096), power=st.integers(0, 4))
def test_binary_units_are_powers_of_1024(amount: int, power: int) -> None:
    assert parse_bytes(f"{amount}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}") == amount << (10 * power)
