"""Mutants of nsa_lab/health: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "health: a training loss that has risen to three times itself is fine",
        "health.learning",
        "if last > max(limits.training_kept * lowest, lowest + chance):",
        "if last > 100 * lowest:",
    ),
    Mutant(
        "health: what few long texts differ by is a rise of the training loss",
        "health.learning",
        "if last > max(limits.training_kept * lowest, lowest + chance):",
        "if last > limits.training_kept * lowest:",
    ),
    Mutant(
        "health: a number that cannot be is a number",
        "health.run",
        "impossible = [] if bad else [",
        "impossible = [] if True else [",
    ),
    Mutant(
        "health: statistics that nobody measures any more are statistics",
        "health.record",
        "            if row >= most:\n",
        "            if row > 10 * most:\n",
    ),
    Mutant(
        "health: a run whose record has no end is finished",
        "health.run",
        "if ok and not any(event",
        "if False and not any(event",
    ),
    Mutant(
        "health: a choice by which no answer is right finds",
        "health.selection",
        'if gain >= limit and right.get("chosen"):',
        "if gain >= limit:",
    ),
    Mutant(
        "health: a choice as good as random ones is fine",
        "health.selection",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("nearest", "no_sel")}',
    ),
    Mutant(
        "health: a choice as good as the nearest is fine",
        "health.selection",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("random", "no_sel")}',
    ),
    Mutant(
        "health: a selected branch of zeros is fine",
        "health.selection",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("random", "nearest")}',
    ),
    Mutant("health: luck counts as a choice", "health.selection", "limits.reach_share * (loss", "0.0 * (loss"),
    Mutant("health: the first reading of the choice is judged", "health.selection", "last = asked[-1]", "last = asked[0]"),
    # Verdicts on a run: each must be able to fail.
    Mutant(
        "health: a run called DONE is finished wherever it stands",
        "health.run",
        "ok = history.reached == steps",
        "ok = True",
    ),
    Mutant(
        "health: a trainer that is gone counts as running",
        "health.run",
        "if state == directory.RUNNING and history.alive:",
        "if state == directory.RUNNING:",
    ),
    Mutant(
        "health: guards looked for among the halts",
        "health.run",
        'every = history.current("guard")',
        'every = history.current("halt")',
    ),
    Mutant(
        "health: a loss that rises counts as one that fell",
        "health.learning",
        "fall = 1 - bpb[-1] / bpb[0]",
        "fall = abs(1 - bpb[-1] / bpb[0])",
    ),
    Mutant(
        "health: rounding decides the unit of the training loss",
        "health.learning",
        "per_token if per_token[0] < limit <= per_byte[0] else per_byte",
        "min(falls)",
    ),
    Mutant(
        "health: the best validation instead of the last",
        "health.learning",
        "ratio = bpb[-1] / bpb[best]",
        "ratio = bpb[best] / bpb[best]",
    ),
    Mutant(
        "health: a leak in validation alone goes unseen",
        "health.learning",
        "np.concatenate([bpb, held_out])",
        "np.concatenate([bpb, held_out + 8])",
    ),
    Mutant(
        "health: half of the warm-up passes",
        "health.learning",
        "return train.lr * step / peak",
        "return train.lr * step / peak / 2",
    ),
    Mutant(
        "health: doubled steps not looked for", "health.steps", "if len(set(seen)) < len(seen) else []", "if False else []"
    ),
    Mutant(
        "health: a checkpoint that was due and missing",
        "health.steps",
        "missing = sorted(step for step in wanted - saved - excused",
        "missing = sorted(step for step in wanted - wanted",
    ),
    Mutant(
        "health: a pace that the trainer warned of is forgiven",
        "health.pace",
        '[e for e in history.current("guard") if e.get("rule") == "slowdown"]',
        "[]",
    ),
    Mutant(
        "health: slow windows forgiven whatever their share",
        "health.pace",
        "ok = share <= limits.slow_share or",
        "ok = share <= 1.0 or",
    ),
    Mutant(
        "health: a slow half hides in the median", "health.pace", "return max(float(np.median", "return min(float(np.median"
    ),
    Mutant(
        "health: a checkpoint without its event was not saved",
        "health.steps",
        "saved = resumed | _whole_on_disk(history) | recorded",
        "saved = recorded",
    ),
    Mutant(
        "health: a stall condemns a run for ever",
        "health.run",
        'found, overcome = by_attempt(history, history.of_kind("stall"))',
        'found, overcome = history.of_kind("stall"), []',
    ),
    Mutant(
        "health: the survivors of a killed rank speak for it",
        "health.run",
        'event.get("cause") is not True, not _fatal(event)',
        "False, not _fatal(event)",
    ),
    Mutant("health: a mirror that failed condemns a run", "health.run", 'event.get("where") not in BESIDE', "True"),
    Mutant("health: what was due is known of every attempt", "health.record", "    if not unknown:", "    if True:"),
    Mutant("health: a run without preflight is not judged", "health.run", "False if trained else None", "None"),
    Mutant("health: null that nobody listed passes", "health.run", "if entry is None or (", "if False and ("),
    Mutant("health: a null rate follows the schedule", "health.learning", "off[~np.isfinite(off)] = np.inf", "pass"),
    Mutant(
        "health: a loss that does not move passes",
        "health.learning",
        "if still >= limits.equal_losses:",
        "if still > 10**9:",
    ),
    Mutant(
        "health: no gradient passes", "health.learning", "if (none := norms == 0).any():", "if (none := norms < 0).any():"
    ),
    Mutant("health: a trial is called healthy", "health.worth", "if steps < limits.trial_steps:", "if steps < 0:"),
    Mutant(
        "health: tokens for parameters are not counted",
        "health.worth",
        "if known.parameters and tokens <",
        "if tokens < 0 *",
    ),
    Mutant("health: any dense run is a twin", "health.worth", "and same_training(history, other).ok is True", ""),
    Mutant(
        "health: a rash rate is no suspect", "health.suspect", "rash = _peak(history) > limits.rash_rate", "rash = False"
    ),
    Mutant(
        "health: shares of gates told by their entropy",
        "health.branches",
        'by_share = f"shares moved by {_least_to_most(np.max(moved, axis=0))}, of 1"',
        'by_share = "shares moved by 0.251 to 0.393, of 1"',
    ),
    Mutant("health: a layer that stayed even is not named", "health.branches", "< limits.gate_even if away", "< 0 if away"),
    Mutant(
        "health: a gate that froze after a while passes",
        "health.branches",
        "if (row >= limits.gate_still).any():",
        "if (row > 10**9).any():",
    ),
    Mutant(
        "health: a gate that trembled passes",
        "health.branches",
        "if (stopped := recent < limits.gate_moved).any():",
        "if (stopped := recent < 0).any():",
    ),
    Mutant(
        "health: gates judged at the end alone",
        "health.branches",
        "if (wrong := now | often).any():",
        "if (wrong := now).any():",
    ),
    Mutant(
        "health: a branch that is silent passes",
        "health.branches",
        "(silent := values == 0).any()",
        "(silent := values < 0).any()",
    ),
    Mutant("health: the status of another run", "health.record", "said == named[0], len", "True, len"),
    Mutant("health: a clock that goes back", "health.record", "ok = back <= limits.clock_back_s", "ok = back >= 0"),
    Mutant(
        "health: a run without heartbeats",
        "health.record",
        "if beats.count(attempt.number) < wanted:",
        "if beats.count(attempt.number) < 0:",
    ),
    Mutant("health: what is missing passes", "health.record", "missing = sorted(due - set(found))", "missing = []"),
    Mutant(
        "health: a gate of zeros passes",
        "health.branches",
        "pinned = np.all(np.abs(entropy - EVEN) < limits.gate_pinned, axis=0)",
        "pinned = np.zeros(entropy.shape[1], bool)",
    ),
    Mutant(
        "health: gate weights that never move pass",
        "health.branches",
        "still = (update == 0).all(axis=0)",
        "still = (update < 0).all(axis=0)",
    ),
    Mutant(
        "health: a collapsed layer hides in the mean",
        "health.branches",
        "if (wrong := now | often).any():",
        "if (wrong := now | often).all():",
    ),
    Mutant(
        "health: one choice for all queries passes",
        "health.selection",
        "if (fixed := reuse > limits.reuse_fixed).any():",
        "if (fixed := reuse > 2).any():",
    ),
    Mutant(
        "health: a wider window passes for a selection",
        "health.selection",
        "if (close := distance < near).any():",
        "if (close := distance < 0).any():",
    ),
    Mutant("paired: neighbours count as independent", "health.paired", "min(len(apart), STRETCHES)", "len(apart)"),
    Mutant(
        "compare: configurations of one name are one model",
        "health.models",
        "if but_seed(alike[0].history) != but_seed(run.history):",
        "if False:",
    ),
    Mutant(
        "compare: how a run was computed is not told", "health.models", "if differ := _differences", "if not _differences"
    ),
    Mutant("compare: an evaluation of any step counts", "health.models", 'found.get("step") != steps', "False"),
    Mutant(
        "compare: other windows make pairs",
        "health.text_pairs",
        "if ours.cut[key] != reading.cut.get(key)",
        "if key == 'bytes' and ours.cut[key] != reading.cut.get(key)",
    ),
    Mutant(
        "compare: the windows of one seed stand for all",
        "health.text_pairs",
        "(np.mean(side, axis=0) for side in parts)",
        "(side[0] for side in parts)",
    ),
    Mutant(
        "compare: what was never looked for counts as far",
        "health.comparison",
        "depth * length >= nsa.l_sel and ",
        "",
    ),
    Mutant("paired: other batches make pairs", "health.paired", "if _batches(first) != _batches(second):", "if False:"),
    Mutant(
        "sweep: runs of one seed count as seeds",
        "health.sweep",
        "[float(np.mean(values)) for values in read.values()]",
        "[value for values in read.values() for value in values]",
    ),
    Mutant(
        "sweep: other texts are compared",
        "health.sweep",
        "comparable = has_mean and (",
        "comparable = has_mean or (",
    ),
    Mutant(
        "sweep: a seed is paired with any of the baseline's",
        "health.sweep",
        "np.mean(ours[seed]) - np.mean(theirs[seed])",
        "np.mean(ours[seed]) - np.mean(theirs[min(theirs)])",
    ),
    Mutant("sweep: noise is called a gain", "health.sweep", "abs(less.mean) <= less.half", "False"),
    Mutant("twins: a time in minutes", "health.twins", '("wall_s", duration)', '("wall_s", lambda s: f"{s / 60:.3f}")'),
    Mutant("health: worse than dense passes", "health.twins", "bool(gap <= limits.twin_gap)", "bool(abs(gap) >= 0)"),
    Mutant(
        "health: twins of other settings",
        "health.twins",
        "differ = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))",
        "differ = []",
    ),
    Mutant("health: how a stage is launched makes no twin", "health.twins", 'if key != "cuda_graph"', "if key"),
    Mutant("paired: two dense models are one", "health.paired", "but_seed(nsa) + but_seed(dense)", "but_seed(nsa)"),
    Mutant(
        "paired: bits of a token for those of a byte",
        "health.paired",
        'nats * event["bpb"] / event["loss"]',
        "nats / np.log(2)",
    ),
    Mutant(
        "paired: the best evaluation for the last",
        "health.paired",
        "run.validation()[1][-1] if",
        "run.validation()[1].min() if",
    ),
    Mutant(
        "compare: the first of two dense models is the baseline", "health.models", "if len(dense) != 1:", "if not dense:"
    ),
]
