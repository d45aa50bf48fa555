"""Breaks the core on purpose and shows that the virtual cluster notices: docs/mutations.md.

    tools/mutations.py            all mutations and both controls; writes docs/mutations.md
    tools/mutations.py --quick    four mutations and one control; writes nothing
    tools/mutations.py NAME ...   these

A mutation changes one to three lines of a copy of one source. The copy is compiled with the command of the build
folder and linked in place of the original; then `diloco-simulate` runs at most 100,000 events (with small tensors, so
that values are checked too). It is caught if an invariant that is expected here is reported, by name: a crash does not
count. A control changes lines without changing what they mean, and must survive.

Exit status 0 only if every mutation was caught by an expected invariant and every control survived.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / os.environ.get("DILOCO_BUILD_DIR", f"build/{sys.implementation.cache_tag}")
PROGRAM = "csrc/diloco/sim/diloco-simulate"
EVENTS = 100_000
SEED = 1
LIMIT_S = 300


@dataclass(frozen=True)
class Mutation:
    name: str
    kind: str  # what of the core it breaks
    source: str  # below csrc/diloco
    old: str
    new: str
    caught_by: tuple[str, ...]  # invariants, any of them; none: a control, which must survive
    quick: bool = False


@dataclass
class Result:
    mutation: Mutation
    invariant: str  # the first one reported, "" = none
    event: int
    problem: str  # "" = as expected


# Sources below csrc/diloco.
UPLINK, ROUNDS, SESSIONS = "core/syncer_uplink.cpp", "core/syncer_rounds.cpp", "core/syncer_sessions.cpp"
PUBLISH, LIVES, INIT = "core/syncer_publish.cpp", "core/syncer_lives.cpp", "core/syncer_init.cpp"
BOUNDARY, LINKS, OUTBOX = "core/learner_boundary.cpp", "core/learner_links.cpp", "core/outbox.cpp"
QUORUM, OUTER = "quorum/quorum.cpp", "outer/outer.cpp"

MUTATIONS = [
    Mutation(
        "a round closes with one contribution too few",
        "quorum",
        QUORUM,
        "return round.complete >= round.quorum && (",
        "return round.complete + 1 >= round.quorum && (round.complete < round.quorum || ",
        ("quorum",),
    ),
    Mutation(
        "a round opens with K - 1",
        "quorum",
        ROUNDS,
        "round.quorum = quorum_of(p);",
        "round.quorum = std::max(1u, quorum_of(p) - 1);",
        ("quorum",),
        quick=True,
    ),
    Mutation(
        "T_K is the clock of the fastest learner",
        "quorum",
        QUORUM,
        "return kth->clock;",
        "return std::max_element(pace.begin(), pace.end(), [](const LearnerPace& a, const LearnerPace& b) "
        "{ return a.clock < b.clock; })->clock;",
        ("schedule",),
    ),
    Mutation(
        "grace lasts twice as long",
        "grace",
        ROUNDS,
        "round.deadline = now + window.seconds;",
        "round.deadline = now + 2.0 * window.seconds;",
        ("grace_deadline", "grace_window"),
    ),
    Mutation(
        "grace forgets the time the quorum took",
        "grace",
        QUORUM,
        "- (xi_quorum + xi_sync);",
        "- xi_sync + 0.0 * xi_quorum;",
        ("grace_window",),
    ),
    Mutation(
        "one learner that was asked is not waited for",
        "grace",
        QUORUM,
        "if (round.waited_for == 0) return",
        "if (round.waited_for <= 1) return",
        ("all_present",),
        quick=True,
    ),
    Mutation(
        "steps are counted from the beginning of the life",
        "counters",
        BOUNDARY,
        "tokens, steps - fragment.from_steps, clock,",
        "tokens, steps, clock,",
        ("counters",),
    ),
    Mutation(
        "the clock of an adopted round is ignored",
        "counters",
        BOUNDARY,
        "clock = std::max(clock, image.clock);",
        "clock = std::max(clock, image.clock - image.clock);",
        ("counters",),
    ),
    Mutation(
        "what was merged is not remembered",
        "counters",
        ROUNDS,
        "account.merged_to[p] = member.begin.to;",
        "account.merged_to[p] = member.begin.from;",
        ("merged_once", "merged_table", "eligibility"),
    ),
    Mutation(
        "a version number is used twice",
        "versions",
        ROUNDS,
        "job.next_version = {epoch, slot.state->version.n + 1};",
        "job.next_version = {epoch, slot.state->version.n + slot.state->version.n % 2};",
        ("version_order",),
    ),
    Mutation(
        "a restarted syncer goes on with the epoch of the last one",
        "versions",
        SESSIONS,
        "epoch = std::max({epoch + 1, options.epoch_floor + 1, at_least});",
        "epoch = std::max({epoch + 1, options.epoch_floor, at_least - 1});",
        ("version_order",),
    ),
    Mutation(
        "work that overwriting drops is not written down",
        "ledger",
        BOUNDARY,
        "  discard(p, sent_to, tokens, reason);\n",
        "  if (sent_to > fragment.from) discard(p, sent_to, tokens, reason);\n",
        ("tokens_partition",),
        quick=True,
    ),
    Mutation(
        "a merged table without those who are gone",
        "ledger",
        PUBLISH,
        "if (merged_to[p] > 0) table.emplace_back(incarnation, merged_to[p]);",
        "if (merged_to[p] > 1000000000) table.emplace_back(incarnation, merged_to[p]);",
        ("merged_table",),
    ),
    Mutation(
        "the mailbox takes what was merged already",
        "mailbox",
        UPLINK,
        "if (contribution.begin.from < merged_to) {",
        "if (contribution.begin.to < merged_to) {",
        ("merged_once", "mailbox"),
    ),
    Mutation(
        "a life that was replaced may come back",
        "supersede",
        LIVES,
        "  account.tombstoned = true;\n",
        "",
        ("tombstone", "one_session", "mailbox"),
    ),
    Mutation(
        "a learner is asked before it has what its work went into",
        "eligibility",
        UPLINK,
        "|| adopted < account.merged_in[p] ||",
        "|| (adopted < account.merged_in[p] && adopted.n == 0) ||",
        ("eligibility",),
        quick=True,
    ),
    Mutation(
        "only who has reached the clock of a round may contribute",
        "eligibility",
        UPLINK,
        "if (eligible(session, round.fragment, round.clock)) asked",
        "if (session.clock >= round.clock && eligible(session, round.fragment, round.clock)) asked",
        ("no_starvation",),
    ),
    Mutation(
        "too little is kept staged",
        "arming",
        UPLINK,
        "if (slots[p].state && session.has(p) && slots[p].due <= horizon) armed.insert(p);",
        "if (slots[p].state && session.has(p) && slots[p].due + 2 <= horizon) armed.insert(p);",
        ("armed",),
    ),
    Mutation(
        "the outer step goes the wrong way",
        "sign",
        OUTER,
        "theta_out[i] = theta_in[i] - lr * gradient[i];",
        "theta_out[i] = theta_in[i] + lr * gradient[i];",
        ("merge_value",),
    ),
    Mutation(
        "rebase adds the merged work a second time",
        "sign",
        BOUNDARY,
        "  if (how.merged && how.formula == AdoptFormula::kRebase) action.sent = how.merged->staged.bytes;\n",
        "",
        ("taken_off",),
    ),
    Mutation(
        "the clock of a fragment stands still",
        "schedule",
        ROUNDS,
        "earliest->due = next_due_clock(p, round.clock);",
        "earliest->due = round.clock + 1;",
        ("schedule",),
    ),
    Mutation(
        "memory is promised twice",
        "memory",
        UPLINK,
        "  session.reserved += slots[p].contribution.bytes;\n",
        "",
        ("memory_bound",),
    ),
    Mutation(
        "a sender counts half of what it sends",
        "credit",
        OUTBOX,
        "credit_.spend(size);",
        "credit_.spend(size / 2);",
        ("credit",),
    ),
    Mutation(
        "the syncer does not count what has arrived",
        "credit",
        UPLINK,
        "  lane.uplink_credit.receive(payload.size());\n",
        "",
        ("no_starvation", "due_merged", "credit"),
    ),
    Mutation(
        "a round leaves what is beyond its quorum in the mailbox",
        "mailbox",
        ROUNDS,
        "if (!account.mailbox[p] || (round",
        "if (!account.mailbox[p] || round.members.size() == round.quorum || (round",
        ("mailbox",),
    ),
    Mutation(
        "tokens squared, not divided by the steps",
        "weights",
        "merge/weights.cpp",
        "tokens * (tokens / steps);",
        "tokens * tokens + 0.0 * steps;",
        ("weights",),
    ),
    Mutation(
        "a shard serves the fragments of all",
        "shards",
        "core/syncer_core.cpp",
        "p < plan.size() && plan.fragments[p].shard == options.shard;",
        "p < plan.size() && plan.fragments[p].shard < options.shards;",
        ("own_shard",),
    ),
    Mutation(
        "control: a condition the other way round",
        "control",
        QUORUM,
        "if (!has_quorum(round)) return {};",
        "if (has_quorum(round) == false) return {};",
        (),
    ),
    Mutation(
        "control: another word in the log",
        "control",
        SESSIONS,
        "learner '{}' joined ({}, pid {})",
        "learner '{}' is here ({}, pid {})",
        (),
        quick=True,
    ),
]


def compile_command(source: Path) -> tuple[list[str], Path]:
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if Path(entry["file"]) == source:
            words = shlex.split(entry["command"])
            return words, Path(entry["directory"])
    raise SystemExit(f"mutations: {source} is not compiled in {BUILD}; make test builds it")


def link_command() -> list[str]:
    done = subprocess.run(
        ["ninja", "-C", str(BUILD), "-t", "commands", PROGRAM], capture_output=True, text=True, check=True
    )
    command = done.stdout.strip().splitlines()[-1]
    return shlex.split(re.sub(r"^: && | && :$", "", command))


def build(mutation: Mutation, folder: Path) -> Path:
    """The program with the mutated source in place of the original: an object given by name comes before archives."""
    source = ROOT / "csrc" / "diloco" / mutation.source
    text = source.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(
            f"mutations: '{mutation.name}' expects its line once in {mutation.source}, found "
            f"{text.count(mutation.old)} times: {mutation.old!r}"
        )
    copy, made, program = folder / source.name, folder / "mutated.o", folder / "diloco-simulate"
    copy.write_text(text.replace(mutation.old, mutation.new))
    words, directory = compile_command(source)
    words = [str(copy) if word == str(source) else word for word in words]
    words[words.index("-o") + 1] = str(made)
    subprocess.run([*words, "-Wno-error"], cwd=directory, check=True, capture_output=True)
    words = link_command()
    words[words.index("-o") + 1] = str(program)
    at = next(i for i, word in enumerate(words) if word.endswith(".a"))
    subprocess.run([*words[:at], str(made), *words[at:]], cwd=BUILD, check=True, capture_output=True)
    return program


def run(program: Path, folder: Path) -> tuple[int, list[dict[str, object]]]:
    report = folder / "report.json"
    command = [str(program), "--events", str(EVENTS), "--seed", str(SEED), "--mode", "small", "--json", str(report)]
    status = subprocess.run(command, capture_output=True, timeout=LIMIT_S).returncode
    return status, json.loads(report.read_text())["violations"] if status in (0, 1) else []


def judge(mutation: Mutation) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            status, violations = run(build(mutation, folder), folder)
        except subprocess.TimeoutExpired:
            return Result(mutation, "", 0, f"ran for more than {LIMIT_S} s")
    named = [one for one in violations if one["invariant"] in mutation.caught_by]
    first = (named or violations or [{"invariant": "", "event": 0}])[0]
    result = Result(mutation, str(first["invariant"]), int(str(first["event"])), "")
    if status not in (0, 1):
        result.problem = f"ended with status {status}"
    elif not mutation.caught_by and violations:
        result.problem = "a control was caught"
    elif mutation.caught_by and not violations:
        result.problem = "survived"
    elif mutation.caught_by and result.invariant not in mutation.caught_by:
        result.problem = f"caught by {result.invariant}, expected {' or '.join(mutation.caught_by)}"
    return result


def page(results: list[Result]) -> str:
    lines = [
        "# Mutations",
        "",
        "Made by `tools/mutations.py`, a part of `make soak`. Each row breaks a copy of the core in one to three lines",
        f"the virtual cluster (seed {SEED}, at most {EVENTS:,} events, small tensors) must report an invariant, by",
        "name. Controls change lines without changing what they mean and must survive. [simulate.md](simulate.md)",
        "explains the invariants.",
        "",
        "| breaks | how | source | caught by | at event |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        m = result.mutation
        caught = f"`{result.invariant}`" if result.invariant else "survived"
        lines.append(f"| {m.kind} | {m.name} | `{m.source}` | {caught} | {result.event or ''} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tools/mutations.py", description="shows that the invariants can fail")
    parser.add_argument("name", nargs="*", help="words of a mutation's name; default: all")
    parser.add_argument("--quick", action="store_true", help="four mutations and a control")
    options = parser.parse_args(argv)
    chosen = [m for m in MUTATIONS if m.quick or not options.quick]
    chosen = [m for m in chosen if not options.name or any(word in m.name for word in options.name)]
    if not chosen:
        parser.error("no mutation has such a name")
    subprocess.run(["cmake", "--build", str(BUILD), "--target", "diloco-simulate"], check=True, capture_output=True)
    began = time.monotonic()
    results = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(judge, chosen):
            results.append(result)
            said = result.problem or (f"caught by {result.invariant}" if result.invariant else "survived, as it must")
            print(f"{result.mutation.kind:12} {result.mutation.name:60} {said}, event {result.event}", flush=True)
    bad = [result for result in results if result.problem]
    print(f"mutations: {len(results) - len(bad)} of {len(results)} as expected, {time.monotonic() - began:.0f} s")
    if chosen == MUTATIONS:
        (ROOT / "docs" / "mutations.md").write_text(page(results))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
