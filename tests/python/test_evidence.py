"""diloco.evidence: statistics, verdicts, a tiny run, the page, the check."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from diloco.evidence import command
from diloco.evidence.check import check, near
from diloco.evidence.command import EvidenceOptions, run_evidence
from diloco.evidence.data import CONTEXT, TOPICS, VOCABULARY, Stream, text
from diloco.evidence.page import page
from diloco.evidence.report import build, write
from diloco.evidence.runner import results_of, run_units, seeds_of, units_of
from diloco.evidence.stats import CONTRADICTED, NOT_RESOLVED, REPRODUCED, Interval, bootstrap, verdict
from diloco.evidence.table import LOSS, Claim, Row, Table, best, best_difference, difference, lower, ratio, same
from diloco.evidence.tables import TABLES
from diloco.evidence.tables.starvation import Starvation, starved
from diloco.evidence.train import BASE, CLASSIC_BASE, Config, Experiment, Result, goodput, run_plain


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def losses(*values: float) -> list[Result]:
    return [Result({"loss": value}) for value in values]


@dataclass(frozen=True)
class Made:
    """A unit without training: its loss is made up."""

    loss: float

    def run(self, seed: int) -> Result:
        return Result({"loss": self.loss + 0.01 * seed}, curve=[(20.0, 2.0), (40.0, self.loss)])


TINY = Table(
    name="tiny",
    title="A tiny table",
    intro="Two rows.",
    rows=(Row("a | b", Made(1.0)), Row("worse", Made(2.0))),
    columns=(LOSS,),
    claims=(
        lower("a | b", "worse", "The first is better", "nobody"),
        lower("worse", "a | b", "The second is better", "nobody"),
        same("a | b", "worse", 0.5, "They are alike", "nobody"),
    ),
    check="worse",
    curve_at=(40.0,),
)


# ---- statistics ----


def test_bootstrap_of_equal_values_is_that_value() -> None:
    assert bootstrap([0.25] * 5) == Interval(0.25, 0.25, 0.25)


def test_bootstrap_of_two_values_takes_all_resamples() -> None:
    # Means 0, 1/2, 1/2, 1: the outer quantiles are the ends.
    assert bootstrap([0.0, 1.0], level=1.0) == Interval(0.5, 0.0, 1.0)


def test_bootstrap_against_the_binomial() -> None:
    # 5 values, one of them 5: the mean of a resample is how often that one was drawn, Binomial(5, 1/5).
    odds = [math.comb(5, k) * 0.2**k * 0.8 ** (5 - k) for k in range(6)]
    tail = 0
    while sum(odds[tail + 1 :]) > 0.025:
        tail += 1
    interval = bootstrap([0.0, 0.0, 0.0, 0.0, 5.0])
    assert (interval.mean, interval.low, interval.high) == (1.0, 0.0, float(tail))


def test_bootstrap_of_many_is_near_the_normal_interval_and_repeatable() -> None:
    values = [math.sin(3.7 * i) for i in range(60)]
    interval = bootstrap(values)
    mean = sum(values) / 60
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 60 / 60)
    assert interval.low == pytest.approx(mean - 1.96 * error, abs=0.02)
    assert interval.high == pytest.approx(mean + 1.96 * error, abs=0.02)
    assert bootstrap(values) == interval


def test_one_seed_or_a_diverged_one_resolves_nothing() -> None:
    for values in ([3.0], [3.0, math.nan], [3.0, math.inf]):
        interval = bootstrap(values)
        assert verdict(interval, 0.0, math.inf) == NOT_RESOLVED
    with pytest.raises(ValueError, match="at least one"):
        bootstrap([])


@pytest.mark.parametrize(
    ("interval", "expected"),
    [((0.1, 0.3), REPRODUCED), ((-0.3, -0.1), CONTRADICTED), ((-0.1, 0.3), NOT_RESOLVED), ((0.0, 0.3), REPRODUCED)],
)
def test_verdict_of_a_difference(interval: tuple[float, float], expected: str) -> None:
    assert verdict(Interval(0.0, *interval), 0.0, math.inf) == expected


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((-0.01, 0.01), REPRODUCED),
        ((0.03, 0.05), CONTRADICTED),
        ((-0.05, -0.03), CONTRADICTED),
        ((0.01, 0.03), NOT_RESOLVED),
        ((-0.1, 0.1), NOT_RESOLVED),
    ],
)
def test_verdict_of_likeness(interval: tuple[float, float], expected: str) -> None:
    assert verdict(Interval(0.0, *interval), -0.02, 0.02) == expected


def test_quantities_are_paired_by_seed() -> None:
    results = {"a": losses(1.0, 2.0, 3.0), "b": losses(2.0, 2.5, 3.25), "c": losses(math.nan, 1.0, 1.0)}
    assert difference("b", "a")(results) == [1.0, 0.5, 0.25]
    assert ratio("b", "a", "loss")(results) == [2.0, 1.25, 3.25 / 3.0]
    assert best(results, ["a", "b"]) == "a" and best(results, ["c", "b"]) == "b"
    assert best_difference(["b", "c"], ["a"])(results) == [1.0, 0.5, 0.25]
    interval, judged = lower("a", "b", "", "").judge(results)
    assert judged == REPRODUCED and interval.low > 0.2


# ---- data and training ----


def test_text_is_made_from_the_seed_and_streams_differ() -> None:
    assert text(0).train.shape[0] == TOPICS and int(text(0).train.max()) < VOCABULARY
    assert not text(0).train.equal(text(1).train)
    first, again, other = (Stream(0, learner, 4, True) for learner in (0, 0, 1))
    window = first.next()
    assert window.shape[1] == CONTEXT + 1
    assert window.equal(again.next()) and not window.equal(other.next())


def test_shares_that_are_not_iid_prefer_their_own_topics() -> None:
    shares = [Stream(0, learner, 4, False).shares for learner in range(4)]
    for learner, share in enumerate(shares):
        assert share.sum().item() == pytest.approx(1.0)
        assert share[learner].item() > 0.4 and share[(learner + 1) % 4].item() < 0.1
    assert sum(shares).allclose(4 * Stream(0, 0, 4, True).shares)  # type: ignore[union-attr]


SHORT = {"speeds": (1.0, 1.2), "steps": 48, "sync_every": 8, "num_fragments": 4}


def test_a_tiny_run_is_deterministic_and_trains() -> None:
    config = BASE.but(**SHORT, curve=True)
    first, again, other = config.run(0), config.run(0), config.run(1)
    assert first == again and first.values != other.values
    assert first.curve[0][1] > first.values["loss"]
    assert 0.5 < first.values["merged"] <= 1.0 and first.values["goodput"] == pytest.approx(1.0, abs=0.1)


def test_lockstep_has_its_rounds_and_cosines() -> None:
    values = CLASSIC_BASE.but(speeds=(1.0, 1.0), steps=48).run(0).values
    assert values["rounds"] == 3 and values["members"] == 2
    assert -1.0 < values["cosine"] < 1.0 and 0.5 < values["shrink"] <= 1.0


def test_misses_and_scripts_do_what_they_say() -> None:
    missed = BASE.but(**SHORT, miss=0.5, grace="fixed", grace_s=1.0)
    assert {action for _, action, _ in missed_moments(missed)} == {"cut", "heal"}
    script = ((10.0, "kill", 1), (20.0, "start", 1), (24.0, "kill syncer", 0), (30.0, "start syncer", 0))
    values = BASE.but(**SHORT, script=script).run(0).values
    assert math.isfinite(values["loss"]) and values["rounds"] > 5


def missed_moments(config: Config) -> list[tuple[float, str, int]]:
    return Experiment(config, 0).moments(float(config.steps))


def test_a_pretrained_start_is_where_plain_training_was() -> None:
    plain = run_plain(Config(plain=True, steps=40), 0).values["loss"]
    fresh = Experiment(BASE.but(**SHORT), 0)
    pretrained = Experiment(BASE.but(**SHORT, pretrain=24), 0)
    assert plain < 3.4
    assert any(not fresh.first[name].equal(pretrained.first[name]) for name in fresh.first)


def test_goodput_is_of_the_last_life() -> None:
    lines = [
        {"event": "open", "t": 0.0, "clock": 5},
        {"event": "merge", "t": 50.0, "clock": 5},
        {"event": "open", "t": 100.0, "clock": 500},
        {"event": "open", "t": 10.0, "clock": 600},
        {"event": "open", "t": 30.0, "clock": 610},
    ]
    records = [json.dumps(line) for line in lines]
    assert goodput(records, 2.0) == 1.0
    assert goodput(records[:1], 1.0) == 0.0


def test_but_changes_fields_and_settings() -> None:
    config = BASE.but(jitter=0.0, outer_lr=0.5)
    assert config.jitter == 0.0 and dict(config.settings)["outer_lr"] == 0.5
    assert config == BASE.but(outer_lr=0.5).but(jitter=0.0) and config != BASE


# ---- running, page and check ----


def test_equal_units_are_run_once() -> None:
    double = Table(**{**TINY.__dict__, "name": "double", "seeds": 1})
    units = units_of([TINY, double], 3)
    assert len(units) == 6 and seeds_of(double, 3) == 1
    told: list[str] = []
    results = run_units(units, 2, told.append)
    assert results_of(double, results, 3)["worse"][0].values == {"loss": 2.0}
    assert [result.values["loss"] for result in results_of(TINY, results, 3)["a | b"]] == [1.0, 1.01, 1.02]


def written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "TABLES", (TINY,))
    assert run_evidence(EvidenceOptions(write=True, seeds=3, folder=str(folder), workers=1)) == 0
    return folder


def test_a_table_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (written(tmp_path, monkeypatch) / "evidence.md").read_text().splitlines()
    assert "## A tiny table" in lines
    assert "| a \\| b | 1.010 ± 0.010 |" in lines
    assert "| loss at step | 40 |" in lines
    verdicts = [line.rsplit("**", 2)[1] for line in lines if line.startswith("| The")]
    assert verdicts == [REPRODUCED, CONTRADICTED, CONTRADICTED]
    assert any("3 claims: 1 reproduced, 2 contradicted, 0 not resolved" in line for line in lines)


def test_check_passes_on_what_was_recorded_and_catches_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, monkeypatch)
    options = EvidenceOptions(check=True, folder=str(folder), workers=1)
    assert run_evidence(options) == 0

    file = folder / "evidence.json"
    recorded = file.read_text()
    report = json.loads(recorded)
    report["tables"][0]["rows"][1]["values"]["loss"][0] += 0.04
    write(report, file)
    (folder / "evidence.md").write_text(page(report, (TINY,)))
    assert check((TINY,), folder, 1, print) == ["tiny, row `worse`: loss was 2.04, is now 2"]
    assert run_evidence(options) == 1

    file.write_text(recorded)
    (found,) = check((TINY,), folder, 1, print)
    assert "evidence.md is not what evidence.json and the code say" in found
    assert run_evidence(EvidenceOptions(page=True, folder=str(folder))) == 0
    assert run_evidence(options) == 0

    report = json.loads(recorded)
    other = Table(**{**TINY.__dict__, "name": "other"})
    (folder / "evidence.md").write_text(page(report, (TINY, other)))
    assert check((TINY,), folder, 1, print, (TINY, other)) == []
    assert check((other,), folder, 1, print, (TINY, other)) == ["other: no such table is recorded"]

    renamed = Table(**{**TINY.__dict__, "check": "gone", "rows": (*TINY.rows, Row("gone", Made(3.0)))})
    assert "no row `gone` is recorded" in check((renamed,), folder, 1, print)[-1]


def test_near() -> None:
    assert near("loss", 2.0, 2.02) and not near("loss", 2.0, 2.04)
    assert near("norm", 10.0, 10.9) and not near("norm", 10.0, 11.2)
    assert near("rounds", 213.0, 213.0) and not near("rounds", 213.0, 214.0) and near("merged", 0.97934, 0.9793400001)
    assert near("cosine", 0.0, 0.015) and near("loss", None, math.nan) and not near("loss", None, 2.0)


def test_arguments_are_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        (EvidenceOptions(tables=("mrege",)), "no table mrege; expected merge, quorum"),
        (EvidenceOptions(tables=("merge",), write=True), "expects no names of tables"),
        (EvidenceOptions(check=True, folder=str(tmp_path)), "evidence.json is missing"),
        (EvidenceOptions(json=str(tmp_path / "no" / "file.json")), "No such file"),
    ):
        assert run_evidence(options) == 2
        assert words in capsys.readouterr().err


def test_every_table_is_whole() -> None:
    assert len({table.name for table in TABLES}) == len(TABLES) == 12
    for table in TABLES:
        names = [row.name for row in table.rows]
        assert len(set(names)) == len(names), table.name
        assert table.check in names and table.claims and table.columns
        made = {row: [Result(dict.fromkeys(METRICS, 1.0)) for _ in range(2)] for row in names}
        for claim in table.claims:
            assert len(claim.quantity(made)) == 2, claim.text
            assert claim.low < claim.high and claim.source and claim.what


METRICS = (
    "loss",
    "norm",
    "merged",
    "goodput",
    "cosine",
    "shrink",
    "largest_fragment",
    "worst",
)


def test_starvation_names_who_starves() -> None:
    result = Starvation(4, 1, 0.2, 0.05).run(0)
    assert [learner["id"] for learner in result.learners] == ["l00", "l01", "l02", "l03"]
    for learner in result.learners:
        told = learner["tokens_merged"] + learner["tokens_open"] + sum(learner["discarded"].values())
        assert told == learner["tokens"]
    assert starved({"row": [result]}) == []
    result.learners[1]["merged"] = 0.5
    assert starved({"row": [result]}) == ["row, seed 0: l01 (3 times the step) has only 50.0% of its work merged"]


def test_report_has_the_keys_of_every_report() -> None:
    report = build([(TINY, {"a | b": losses(1.0), "worse": losses(math.nan)})], 1, 2.0, "diloco evidence")
    assert {"schema", "command", "commit", "machine", "seed", "software"} <= report.keys()
    assert report["tables"][0]["rows"][1]["values"]["loss"] == [None]
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_claim_is_judged_by_its_range() -> None:
    claim = Claim("", "", lambda results: [0.5, 0.52, 0.51], "", 0.4, 0.6)
    assert claim.judge({})[1] == REPRODUCED
