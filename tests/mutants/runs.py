"""Mutants of nsa_lab/runs: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "status: steps that a later attempt repeated count",
        "runs.events",
        "for later, first in from_steps.items() if later > attempt), default=max_step)",
        "for later, first in from_steps.items() if later < attempt), default=max_step)",
    ),
    Mutant(
        "status: the first evaluation that the end of a record has",
        "runs.events",
        "evaluations[0] if evaluations",
        "evaluations[-1] if evaluations",
    ),
    Mutant(
        "status: training losses count as validation",
        "runs.events",
        'elif kind == "eval" and event.get("split") == "validation":',
        'elif kind == "eval":',
    ),
    Mutant(
        "status: a step that is no number of 64 bits",
        "runs.events",
        "all(is_int(number) and number >= 0 for",
        "all(isinstance(number, int) and number >= 0 for",
    ),
    Mutant("names: an empty text is the working directory", "runs.resolve", "if run.strip() and (run_dir", "if (run_dir"),
    Mutant("outputs: a missing folder has no runs", "runs.resolve", "outputs is not None and not folder.exists()", "False"),
    Mutant(
        "outputs: a private folder has no runs",
        "runs.resolve",
        "if folder.exists() and not os.access",
        "if False and os.access",
    ),
    Mutant(
        "names: a folder as config.yaml is not named",
        "runs.resolve",
        "            directory.check_run_dir(path)  # names",
        "            pass  # names",
    ),
    Mutant(
        "output: a device is replaced", "runs.atomic_io", "if mode is not None and not stat.S_ISREG(mode):", "if False:"
    ),
    Mutant("output: a link is followed", "runs.atomic_io", "mode = path.lstat()", "mode = path.stat()"),
    Mutant("output: the folder may be missing", "runs.atomic_io", "if not os.path.isdir(folder):", "if False:"),
    Mutant(
        "evaluation: files that cannot be written are not checked",
        "runs.model_files",
        "        check_output_file(folder / name)\n",
        "        pass\n",
    ),
    Mutant("names: ~ is a folder", "runs.resolve", "Path(os.path.expanduser(text))", "Path(text)"),
    Mutant(
        "names: a folder is nothing",
        "runs.resolve",
        'return "the directory of a run" if _is_file(path / directory.CONFIG) else "a folder"',
        "return None",
    ),
    Mutant(
        "digests: a segment may have any content",
        "runs.segment_digests",
        'is_equal = is_inside and _hash_bytes(file, segments.end, size) == event["sha256"]',
        "is_equal = is_inside",
    ),
    Mutant(
        "digests: an edit changes all later segments",
        "runs.segment_digests",
        "segments.end + size if is_equal else offset",
        "segments.end + size",
    ),
    Mutant(
        "digests: an incomplete line is in the segment before it",
        "runs.segment_digests",
        "        digest.update(lines + line_end)\n",
        "        digest.update(lines + line_end + rest)\n",
    ),
    Mutant(
        "digests: a damaged size is hashed to the end of the file",
        "runs.segment_digests",
        "0 < size <= offset - segments.end",
        "0 < size",
    ),
    Mutant(
        "digests: those of an evaluation are not compared", "runs.evaluation", "if DIGEST in record and", "if False and"
    ),
    Mutant(
        "digests: keys of an evaluation that become text change it",
        "runs.evaluation",
        "json.loads(json.dumps(evaluation))",
        "dict(evaluation)",
    ),
    Mutant(
        "history: first events are built again", "runs.event_table", "events._built = list(self)", "events._built = None"
    ),
    Mutant(
        "names: a shortened list does not state the rest",
        "runs.resolve",
        "if len(names) > MAX_LISTED else",
        "if len(names) > 99 else",
    ),
    Mutant(
        "events: an attempt ends only where the next one starts",
        "runs.events",
        "lowest = min(lowest, resumed_at.get(int(attempts[index]), math.inf))",
        "lowest = resumed_at.get(int(attempts[index]), math.inf)",
    ),
    Mutant(
        "events: the second of two attempts supersedes nothing",
        "runs.events",
        "if len(attempts) < 2:",
        "if len(attempts) < 3:",
    ),
    Mutant(
        "status: a list of objects reads whole records",
        "cli.status_table",
        "summaries.append(_summarize_briefly(run_dir))",
        "summaries.append(summarize_run(run_dir))",
    ),
    Mutant(
        "history: the best validation is the worst",
        "runs.history",
        "best_validation_bpb=float(np.nanmin(validation))",
        "best_validation_bpb=float(np.nanmax(validation))",
    ),
    Mutant(
        "history: a nonfatal error is a failure",
        "runs.attempts",
        'for event in events.of_kind("error") if event.get("fatal")}',
        'for event in events.of_kind("error")}',
    ),
    Mutant(
        "checkpoints: weights of any shape fit",
        "runs.checkpoint_files",
        "if saved_shape != expected_shape:",
        "if False:",
    ),
    Mutant("ranks: GPUs are not counted", "runs.lifecycle", "if 0 < n_gpus < n_ranks:", "if False:"),
    Mutant(
        "checkpoints: any folder name is accepted",
        "runs.checkpoint_files",
        "if checkpoint.name !=",
        "if False and checkpoint.name !=",
    ),
    Mutant(
        "history: an attempt is judged by the latest settings",
        "runs.history",
        'by_settings[key] = apply_monitor_settings(self.config, first_event["settings"])',
        "by_settings[key] = self.config",
    ),
    Mutant(
        "history: unrecorded settings are those of config.yaml",
        "runs.history",
        'is_known = first_event.get("config_hash", own_hash) == own_hash',
        "is_known = True",
    ),
    Mutant(
        "history: all attempts have the settings of the first one",
        "runs.history",
        'key = repr(first_event["settings"])',
        'key = ""',
    ),
    Mutant(
        "attempts: each attempt is compared with all events",
        "runs.attempts",
        "own = positions[number]",
        'own = np.flatnonzero(events.ints("attempt") == number)',
    ),
    Mutant(
        "history: a mean instead of the median speed",
        "runs.history",
        "float(np.median(values)) for values",
        "float(np.mean(values)) for values",
    ),
    Mutant("history: training loss of the last batch", "runs.history", "LATEST_READINGS = 50", "LATEST_READINGS = 1"),
    Mutant(
        "history: training loss of few long documents", "runs.history", "LATEST_MAX_ERROR = 0.05", "LATEST_MAX_ERROR = 9"
    ),
    Mutant("history: training loss includes early readings", "runs.history", "len(finite) // 2 and", "len(finite) and"),
    Mutant(
        "rerun: the run's own settings are lost",
        "health.divergence",
        "[*changed_keys, *(key for key, *_ in diff_settings(base, new_config))]",
        "changed_keys",
    ),
    Mutant(
        "evaluation: a folder without a status has none",
        "runs.evaluation",
        '.get("run", record["run"])',
        '.get("run")',
    ),
    Mutant(
        "evaluation: lists may have any length",
        "runs.evaluation_schema",
        "if len(values) != n_expected:",
        "if not values:",
    ),
    Mutant(
        "evaluation: Wilson interval centered on the proportion",
        "runs.evaluation",
        "proportion + spread / 2, Z",
        "proportion, Z",
    ),
    Mutant(
        "history: compilation counts as step time",
        "runs.history",
        "is_used = ~is_with_compilation(history) & np.isfinite(step_s)",
        "is_used = np.isfinite(step_s)",
    ),
    Mutant("sweep: two runs on one GPU", "runs.sweep_runner", "[gpu for gpu in gpus if gpu not in busy.values()]", "gpus"),
    Mutant(
        "sweep: halted runs are trained again",
        "runs.sweep_runner",
        "not in (RUNNING, DONE, HALTED)",
        "not in (RUNNING, DONE)",
    ),
    Mutant("sweep: a live trainer has no GPU", "runs.sweep_runner", 'run.status.get("gpu") or gpus[0]', "gpus[0]"),
    Mutant("sweep: one name for two configurations", "runs.sweep_runner", "            sweep._check_names()\n", ""),
    Mutant("sweep: an interrupt does not stop the runs", "runs.sweep_runner", "            self._stop_all(report)\n", ""),
    Mutant(
        "events: a repeated step counts twice",
        "runs.events",
        "lowest = min(lowest, resumed_at.get(int(attempts[index]), math.inf))",
        "lowest = math.inf",
    ),
    Mutant(
        "history: losses on different texts are compared",
        "runs.history",
        "for run in runs if run.evaluations}) > 1",
        "for run in runs if run.evaluations}) > 9",
    ),
    Mutant(
        "export: a repeated step",
        "runs.csv_export",
        "for event in history.steps)",
        'for event in history.events_of_kind("step"))',
    ),
    Mutant(
        "checkpoint: sizes checked, contents not",
        "runs.checkpoint_files",
        'if not check_hashes or read_manifest_entry(path)["sha256"] == entry["sha256"]:',
        'if not check_hashes or read_manifest_entry(path)["sha256"]:',
    ),
    # Ranks, a full disk, damage, stalls.
    Mutant(
        "runs: a surviving rank does not count",
        "runs.lock",
        "return orphans[0] if orphans else None",
        "return None",
    ),
    Mutant("runs: a reader opens the lock to write", "runs.lock", "os.O_RDONLY | os.O_CLOEXEC", "os.O_RDWR | os.O_CLOEXEC"),
    Mutant(
        "damage: an event needs no step",
        "runs.event_builder",
        'if not {"t", "attempt", "step"} <= fields.keys()',
        'if not {"t", "attempt"} <= fields.keys()',
    ),
    Mutant(
        "schema: an integer of any size is valid",
        "runs.event_fields",
        "return type(value) is int and -MAX_INT - 1 <= value <= MAX_INT",
        "return type(value) is int",
    ),
    Mutant(
        "schema: a step after the end of the run is an event",
        "runs.event_builder",
        "and min(steps) >= 0 and max(steps) <= self._max_step",
        "and min(steps) >= 0",
    ),
    Mutant(
        "schema: a missing number is not null",
        "runs.event_builder",
        "self._store(kind, {**fields, **{name: [None] * len(lines) for name in nullable}}, lines)",
        "self._store(kind, fields, lines)",
    ),
    Mutant(
        "schema: a wrong optional field hides its event",
        "runs.event_builder",
        "is_skipped = not wrong or any(known[name].is_required for name in wrong)",
        "is_skipped = True",
    ),
    Mutant(
        "schema: integers of a batch may have any size",
        "runs.event_fields",
        "and max(values) <= MAX_INT",
        "",
    ),
    Mutant(
        "schema: events of one kind have the same fields",
        "runs.event_builder",
        "form = kind, tuple(event)",
        "form = kind, next((names for own, names in self._pending if own == kind), tuple(event))",
    ),
    Mutant(
        "schema: the last event of each kind has no line number",
        "runs.event_builder",
        "self.violations.add(Violation(line, kind, problem, is_skipped))",
        "self.violations.add(Violation(1, kind, problem, is_skipped))",
    ),
    Mutant(
        "columns: a row without a value has the last one", "runs.event_columns", "has = indices >= 0", "has = indices >= -1"
    ),
    Mutant(
        "columns: a list that is read is the stored one", "runs.event_columns", "if not self._has_containers:", "if True:"
    ),
    Mutant("columns: a batch of lists ends early", "runs.event_columns", "map(len, values[1:])", "map(len, values[:-1])"),
    Mutant("io: half of a surrogate pair is not JSON", "runs.atomic_io", "return json.loads(data)  #", "raise  #"),
    Mutant(
        "io: a key that occurs twice is read",
        "runs.atomic_io",
        "(parse_unique_json if unique else parse_json)",
        "parse_json",
    ),
    Mutant("io: a long file is cut", "runs.atomic_io", "data += file.read(max_bytes + 1 - BLOCK_BYTES)", "pass"),
    Mutant(
        "table: a sparse field belongs to the first rows",
        "runs.event_columns",
        "if self.rows is None and first_row != len(self):",
        "if False:",
    ),
    Mutant(
        "table: values that are no numbers are those of the first reading",
        "runs.event_columns",
        "if len(self._known_exceptions[0]) < len(self.exceptions):",
        "if not len(self._known_exceptions[0]):",
    ),
    Mutant(
        "table: all values that are no numbers are the first of them",
        "runs.event_columns",
        "numbers[positions[is_exception]]",
        "numbers[0]",
    ),
    Mutant(
        "table: a large integer is rounded",
        "runs.event_columns",
        "EXACT_INT = 2**53",
        "EXACT_INT = 2**63",
    ),
    Mutant(
        "table: events are in the order of their kinds",
        "runs.event_table",
        'ids = np.argsort(np.concatenate(lines), kind="stable") if lines',
        "ids = np.arange(sum(map(len, lines))) if lines",
    ),
    Mutant(
        "due steps: the common multiples of two intervals count twice",
        "health.due_steps",
        "if len(every) > 1:",
        "if len(every) > 2:",
    ),
    Mutant(
        "damage: invalid lines are skipped without a warning",
        "runs.events",
        '        warn_once(f"{path}: a line is not',
        '        str(f"{path}: a line is not',
    ),
    Mutant(
        "damage: a cut file of JSON raises",
        "runs.atomic_io",
        "except (ValueError, RecursionError) as error:",
        "except RecursionError as error:",
    ),
    Mutant(
        "damage: a file counts as a checkpoint",
        "runs.checkpoint_files",
        "if is_checkpoint_name(name) and (folder / name).is_dir())",
        "if is_checkpoint_name(name))",
    ),
    Mutant("damage: wrong tokens at any loss", "runs.evaluation_schema", "self.loss < lowest * (1", "self.loss < 0.0 * (1"),
    Mutant(
        "damage: any number of right tokens",
        "runs.evaluation_schema",
        '_check_between("tokens_right", self.tokens_right, least, most, self.right)',
        "pass",
    ),
    Mutant(
        "damage: any number of right answers at a depth",
        "runs.evaluation_schema",
        "self.right - n_others, self.right, self.right)",
        "0, self.sequences, self.right)",
    ),
    Mutant(
        "damage: a score of other answers", "runs.evaluation_schema", "abs(self.score - score) > SCORE_ROUNDING", "False"
    ),
    Mutant(
        "damage: a score outside its interval",
        "runs.evaluation_schema",
        "if not self.low <= self.score <= self.high:",
        "if False:",
    ),
    Mutant("damage: a task of RULER twice", "runs.evaluation_schema", "cells.count((task, length)) > 1", "False"),
    Mutant(
        "damage: wordings of other answers",
        "runs.evaluation_schema",
        "n_right, self.right, self.right,",
        "n_right, 0, n_right,",
    ),
    Mutant("damage: a manifest may name files elsewhere", "runs.checkpoint_files", "Path(name).name == name and ", ""),
    Mutant(
        "damage: a copied run hides the others",
        "runs.lifecycle",
        "        except RunDirectoryError as error:\n            # A renamed copy",
        "        except ZeroDivisionError as error:\n            # A renamed copy",
    ),
    Mutant("report: the speed of the first stage", "runs.history", "tokens_per_s=speeds[-1]", "tokens_per_s=speeds[0]"),
    Mutant(
        "history: the first step of a stage counts as step time",
        "runs.history",
        "is_first_of_attempt | np.isin(steps, list(history.config.train.first_steps))",
        "is_first_of_attempt",
    ),
]
