"""Mutants of nsa_lab/health: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "health: a training loss that has risen to three times itself is fine",
        "health.loss_checks",
        "if last > max(limits.training_ratio_to_lowest * lowest, lowest + chance):",
        "if last > 100 * lowest:",
    ),
    Mutant(
        "health: what few long texts differ by is a rise of the training loss",
        "health.loss_checks",
        "if last > max(limits.training_ratio_to_lowest * lowest, lowest + chance):",
        "if last > limits.training_ratio_to_lowest * lowest:",
    ),
    Mutant(
        "health: a number that cannot be is a number",
        "health.run_checks",
        "impossible = [] if bad else [",
        "impossible = [] if True else [",
    ),
    Mutant(
        "health: statistics that nobody measures any more are statistics",
        "health.log_integrity",
        "            if row >= most:\n",
        "            if row > 10 * most:\n",
    ),
    Mutant(
        "health: a run whose record has no end is finished",
        "health.run_checks",
        "if ok and not any(event",
        "if False and not any(event",
    ),
    Mutant(
        "health: a choice by which no answer is right finds",
        "health.selection_checks",
        'if gain >= limit and right.get("chosen"):',
        "if gain >= limit:",
    ),
    Mutant(
        "health: a choice as good as random ones is fine",
        "health.selection_checks",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("nearest", "no_sel")}',
    ),
    Mutant(
        "health: a choice as good as the nearest is fine",
        "health.selection_checks",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("random", "no_sel")}',
    ),
    Mutant(
        "health: a selected branch of zeros is fine",
        "health.selection_checks",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("random", "nearest")}',
    ),
    Mutant(
        "health: luck counts as a choice", "health.selection_checks", "limits.selection_gain_share * (loss", "0.0 * (loss"
    ),
    Mutant(
        "health: the first reading of the choice is judged",
        "health.selection_checks",
        "last = asked[-1]",
        "last = asked[0]",
    ),
    # Verdicts on a run: each must be able to fail.
    Mutant(
        "health: a run called DONE is finished wherever it stands",
        "health.run_checks",
        "ok = history.last_step == steps",
        "ok = True",
    ),
    Mutant(
        "health: a trainer that is gone counts as running",
        "health.run_checks",
        "if state == directory.RUNNING and history.is_alive:",
        "if state == directory.RUNNING:",
    ),
    Mutant(
        "health: guards looked for among the halts",
        "health.run_checks",
        'every = history.current_events("guard")',
        'every = history.current_events("halt")',
    ),
    Mutant(
        "health: a loss that rises counts as one that fell",
        "health.loss_checks",
        "fall = 1 - bpb[-1] / bpb[0]",
        "fall = abs(1 - bpb[-1] / bpb[0])",
    ),
    Mutant(
        "health: rounding decides the unit of the training loss",
        "health.loss_checks",
        "per_token if per_token[0] < limit <= per_byte[0] else per_byte",
        "min(falls)",
    ),
    Mutant(
        "health: the best validation instead of the last",
        "health.loss_checks",
        "ratio = bpb[-1] / bpb[best]",
        "ratio = bpb[best] / bpb[best]",
    ),
    Mutant(
        "health: a leak in validation alone goes unseen",
        "health.loss_checks",
        "np.concatenate([bpb, held_out])",
        "np.concatenate([bpb, held_out + 8])",
    ),
    Mutant(
        "health: half of the warm-up passes",
        "health.loss_checks",
        "return train.lr * step / peak",
        "return train.lr * step / peak / 2",
    ),
    Mutant(
        "health: doubled steps not looked for",
        "health.step_accounting",
        "if len(set(seen)) < len(seen) else []",
        "if False else []",
    ),
    Mutant(
        "health: a checkpoint that was due and missing",
        "health.step_accounting",
        "missing = sorted(step for step in wanted - saved - excused",
        "missing = sorted(step for step in wanted - wanted",
    ),
    Mutant(
        "health: a pace that the trainer warned of is forgiven",
        "health.throughput_checks",
        '[e for e in history.current_events("guard") if e.get("rule") == "slowdown"]',
        "[]",
    ),
    Mutant(
        "health: slow windows forgiven whatever their share",
        "health.throughput_checks",
        "ok = share <= limits.slow_share or",
        "ok = share <= 1.0 or",
    ),
    Mutant(
        "health: a slow half hides in the median",
        "health.throughput_checks",
        "return max(float(np.median",
        "return min(float(np.median",
    ),
    Mutant(
        "health: a checkpoint without its event was not saved",
        "health.step_accounting",
        "saved = resumed | _list_intact_steps(history) | recorded",
        "saved = recorded",
    ),
    Mutant(
        "health: a stall condemns a run for ever",
        "health.run_checks",
        'found, overcome = split_by_attempt(history, history.events_of_kind("stall"))',
        'found, overcome = history.events_of_kind("stall"), []',
    ),
    Mutant(
        "health: the survivors of a killed rank speak for it",
        "health.run_checks",
        'event.get("cause") is not True, not _is_fatal(event)',
        "False, not _is_fatal(event)",
    ),
    Mutant(
        "health: a mirror that failed condemns a run",
        "health.run_checks",
        'event.get("where") not in NONCRITICAL_PARTS',
        "True",
    ),
    Mutant("health: what was due is known of every attempt", "health.log_integrity", "    if not unknown:", "    if True:"),
    Mutant("health: a run without preflight is not judged", "health.run_checks", "False if trained else None", "None"),
    Mutant("health: null that nobody listed passes", "health.run_checks", "if entry is None or (", "if False and ("),
    Mutant("health: a null rate follows the schedule", "health.loss_checks", "off[~np.isfinite(off)] = np.inf", "pass"),
    Mutant(
        "health: a loss that does not move passes",
        "health.loss_checks",
        "if still >= limits.equal_losses:",
        "if still > 10**9:",
    ),
    Mutant(
        "health: no gradient passes",
        "health.loss_checks",
        "if (none := norms == 0).any():",
        "if (none := norms < 0).any():",
    ),
    Mutant("health: a trial is called healthy", "health.references", "if steps < limits.trial_steps:", "if steps < 0:"),
    Mutant(
        "health: tokens for parameters are not counted",
        "health.references",
        "if known.parameters and tokens <",
        "if tokens < 0 *",
    ),
    Mutant(
        "health: any dense run is a twin", "health.references", "and check_same_training(history, other).ok is True", ""
    ),
    Mutant(
        "health: a rash rate is no suspect",
        "health.divergence",
        "rash = _get_peak_lr(history) > limits.risky_lr",
        "rash = False",
    ),
    Mutant(
        "health: shares of gates told by their entropy",
        "health.branch_checks",
        'by_share = f"shares moved by {_format_range(np.max(moved, axis=0))}, of 1"',
        'by_share = "shares moved by 0.251 to 0.393, of 1"',
    ),
    Mutant(
        "health: a layer that stayed even is not named", "health.branch_checks", "< limits.gate_even if away", "< 0 if away"
    ),
    Mutant(
        "health: a gate that froze after a while passes",
        "health.branch_checks",
        "if (row >= limits.gate_constant_readings).any():",
        "if (row > 10**9).any():",
    ),
    Mutant(
        "health: a gate that trembled passes",
        "health.branch_checks",
        "if (stopped := recent < limits.gate_min_change).any():",
        "if (stopped := recent < 0).any():",
    ),
    Mutant(
        "health: gates judged at the end alone",
        "health.branch_checks",
        "if (wrong := now | often).any():",
        "if (wrong := now).any():",
    ),
    Mutant(
        "health: a branch that is silent passes",
        "health.branch_checks",
        "(silent := values == 0).any()",
        "(silent := values < 0).any()",
    ),
    Mutant("health: the status of another run", "health.log_integrity", "said == named[0], len", "True, len"),
    Mutant("health: a clock that goes back", "health.log_integrity", "ok = back <= limits.clock_back_s", "ok = back >= 0"),
    Mutant(
        "health: a run without heartbeats",
        "health.log_integrity",
        "if beats.count(attempt.number) < wanted:",
        "if beats.count(attempt.number) < 0:",
    ),
    Mutant("health: what is missing passes", "health.log_integrity", "missing = sorted(due - set(found))", "missing = []"),
    Mutant(
        "health: a gate of zeros passes",
        "health.branch_checks",
        "pinned = np.all(np.abs(entropy - MAX_ENTROPY) < limits.gate_pinned, axis=0)",
        "pinned = np.zeros(entropy.shape[1], bool)",
    ),
    Mutant(
        "health: gate weights that never move pass",
        "health.branch_checks",
        "still = (update == 0).all(axis=0)",
        "still = (update < 0).all(axis=0)",
    ),
    Mutant(
        "health: a collapsed layer hides in the mean",
        "health.branch_checks",
        "if (wrong := now | often).any():",
        "if (wrong := now | often).all():",
    ),
    Mutant(
        "health: one choice for all queries passes",
        "health.selection_checks",
        "if (fixed := reuse > limits.reuse_constant).any():",
        "if (fixed := reuse > 2).any():",
    ),
    Mutant(
        "health: a wider window passes for a selection",
        "health.selection_checks",
        "if (close := distance < near).any():",
        "if (close := distance < 0).any():",
    ),
    Mutant(
        "paired: neighbours count as independent", "health.paired_difference", "min(len(apart), MAX_SEGMENTS)", "len(apart)"
    ),
    Mutant(
        "compare: configurations of one name are one model",
        "health.model_runs",
        "if make_seed_group_key(alike[0].history) != make_seed_group_key(run.history):",
        "if False:",
    ),
    Mutant(
        "compare: how a run was computed is not told",
        "health.model_runs",
        "if differ := _describe_differences",
        "if not _describe_differences",
    ),
    Mutant("compare: an evaluation of any step counts", "health.model_runs", 'found.get("step") != steps', "False"),
    Mutant(
        "compare: other windows make pairs",
        "health.paired_text_loss",
        "if ours.conditions[key] != reading.conditions.get(key)",
        "if key == 'bytes' and ours.conditions[key] != reading.conditions.get(key)",
    ),
    Mutant(
        "compare: the windows of one seed stand for all",
        "health.paired_text_loss",
        "(np.mean(side, axis=0) for side in parts)",
        "(side[0] for side in parts)",
    ),
    Mutant(
        "compare: what was never looked for counts as far",
        "health.comparison",
        "depth * length >= nsa.l_sel and ",
        "",
    ),
    Mutant(
        "paired: other batches make pairs",
        "health.paired_difference",
        "if _get_batch_identity(first) != _get_batch_identity(second):",
        "if False:",
    ),
    Mutant(
        "sweep: runs of one seed count as seeds",
        "health.sweep_results",
        "[float(np.mean(values)) for values in read.values()]",
        "[value for values in read.values() for value in values]",
    ),
    Mutant(
        "sweep: other texts are compared",
        "health.sweep_results",
        "comparable = has_mean and (",
        "comparable = has_mean or (",
    ),
    Mutant(
        "sweep: a seed is paired with any of the baseline's",
        "health.sweep_results",
        "np.mean(ours[seed]) - np.mean(theirs[seed])",
        "np.mean(ours[seed]) - np.mean(theirs[min(theirs)])",
    ),
    Mutant("sweep: noise is called a gain", "health.sweep_results", "abs(less.mean) <= less.half", "False"),
    Mutant(
        "twins: a time in minutes",
        "health.matched_pair",
        '("wall_s", format_duration)',
        '("wall_s", lambda s: f"{s / 60:.3f}")',
    ),
    Mutant(
        "health: worse than dense passes", "health.matched_pair", "bool(gap <= limits.dense_gap)", "bool(abs(gap) >= 0)"
    ),
    Mutant(
        "health: twins of other settings",
        "health.matched_pair",
        "differ = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))",
        "differ = []",
    ),
    Mutant("health: how a stage is launched makes no twin", "health.matched_pair", 'if key != "cuda_graph"', "if key"),
    Mutant(
        "paired: two dense models are one",
        "health.paired_difference",
        "make_seed_group_key(nsa) + make_seed_group_key(dense)",
        "make_seed_group_key(nsa)",
    ),
    Mutant(
        "paired: bits of a token for those of a byte",
        "health.paired_difference",
        'nats * event["bpb"] / event["loss"]',
        "nats / np.log(2)",
    ),
    Mutant(
        "paired: the best evaluation for the last",
        "health.paired_difference",
        "run.validation()[1][-1] if",
        "run.validation()[1].min() if",
    ),
    Mutant(
        "compare: the first of two dense models is the baseline",
        "health.model_runs",
        "if len(dense) != 1:",
        "if not dense:",
    ),
]
