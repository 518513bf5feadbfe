"""Faults in what public users, damaged files and other users' rights showed: runs, checkpoints, texts, checks."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    # Checks of records.
    Mutant(
        "checks: values may take turns",
        "health.repetition_checks",
        "if shares[least] < limits.distinct_share:",
        "if False:",
    ),
    Mutant(
        "checks: a part of the run may repeat another",
        "health.repetition_checks",
        "if share <= limits.repeated_share:",
        "if True:",
    ),
    Mutant(
        "checks: only ten intervals are compared with the clock",
        "health.consistency_checks",
        "in N_INTERVALS if count <= len(needed)",
        "in N_INTERVALS[:1] if count <= len(needed)",
    ),
    Mutant(
        "checks: two layers may share a statistic",
        "health.identity_checks",
        "if len(places) > MAX_EQUAL:",
        "if False:",
    ),
    Mutant(
        "checks: constant statistics of layers are equal layers",
        "health.identity_checks",
        "is_equal &= varies[:layer] & varies[layer]",
        "pass",
    ),
    Mutant(
        "checks: waves of the loss pass",
        "health.loss_course",
        "if ratio <= limits.course_wave or",
        "if True or",
    ),
    Mutant(
        "checks: every spectrum is a wave",
        "health.loss_course",
        "if ratio <= limits.course_wave or height <= limits.course_wave_height * float(np.median(bpb)):",
        "if False:",
    ),
    Mutant(
        "checks: a late leak passes",
        "health.loss_checks",
        " or _find_validation_drop(history, limits)",
        "",
    ),
    Mutant(
        "checks: a fall of both losses is a leak",
        "health.loss_checks",
        "max(min(train_change, 1.0), 1e-9)",
        "1.0",
    ),
    Mutant(
        "checks: a leak that begins late passes",
        "health.throughput_checks",
        "(half, len(resident), limits.memory_trend_late)",
        "(half, len(resident), 1.0)",
    ),
    Mutant(
        "checks: memory may grow in steps",
        "health.throughput_checks",
        "rises.sum() < MIN_RISES",
        "True",
    ),
    Mutant(
        "checks: heartbeats are due in a suspension",
        "health.completeness_checks",
        " - suspended_s.get(attempt.number, 0.0)",
        "",
    ),
    Mutant(
        "checks: a described run has no purpose",
        "health.summary_sentence",
        "return config.description or",
        "return",
    ),
    # Runs.
    Mutant("stop: any pid is a trainer", "runs.lock", "not 1 < pid < 1 << 31", "not -10 < pid < 1 << 31"),
    Mutant("stop: a pid may have 40 bits", "runs.lock", "not 1 < pid < 1 << 31", "not 1 < pid < 1 << 62"),
    Mutant("stop: a trainer of another host is signaled", "runs.lifecycle", "if not is_local(owner):", "if False:"),
    Mutant(
        "stop: the pid of an earlier trainer is signaled",
        "runs.lock",
        "if not _is_alive(owner):\n            return False",
        "if False:\n            return False",
    ),
    Mutant("ensure: without a lock", "runs.lifecycle", "fcntl.flock(lock, fcntl.LOCK_EX)", "pass"),
    Mutant(
        "notebook: two start two runs",
        "workbook.notebook",
        "with lifecycle.hold_creation_lock(folder):",
        "if True:",
    ),
    Mutant(
        "rights: every private folder is a run",
        "runs.directory",
        "return bool(_RUN_ID_TIME.search(name))",
        "return True",
    ),
    Mutant(
        "rights: a private run does not exist",
        "runs.resolve",
        "if os.path.isdir(path) and not os.access",
        "if False and not os.access",
    ),
    Mutant(
        "rights: a folder on PATH ends every run",
        "runs.environment",
        "except (OSError, subprocess.TimeoutExpired)",
        "except (FileNotFoundError, subprocess.TimeoutExpired)",
    ),
    Mutant(
        "links: a file is written through one",
        "runs.atomic_io",
        "os.O_NOFOLLOW | os.O_CLOEXEC, 0o666",
        "os.O_CLOEXEC, 0o666",
    ),
    Mutant(
        "links: a tree is removed through one", "runs.atomic_io", "path.is_dir() and not path.is_symlink()", "path.is_dir()"
    ),
    Mutant(
        "errors: without a path they have a remedy",
        "config.errors",
        "if error.filename is None or error.errno not in _REMEDIES:",
        "if error.errno not in _REMEDIES:",
    ),
    Mutant(
        "errors: a deleted folder is one to start in",
        "config.errors",
        "    except FileNotFoundError:\n        return False",
        "    except FileNotFoundError:\n        return True",
    ),
    # Checkpoints.
    Mutant(
        "manifest: a checkpoint needs no weights",
        "runs.checkpoint_files",
        "if not any(name in WEIGHT_FILES for name, _ in files):",
        "if False:",
    ),
    Mutant(
        "manifest: a thread for each file",
        "runs.checkpoint_files",
        "min(len(files), N_READERS)",
        "max(len(files), 1)",
    ),
    Mutant("manifest: a key may occur twice", "runs.atomic_io", "if len(value) < len(pairs):", "if False:"),
    Mutant("manifest: every problem is listed", "runs.checkpoint_files", "[*problems[:MAX_PROBLEMS], *more]", "problems"),
    Mutant(
        "content: signed files are whole",
        "train.checkpoint",
        "find_problems(path) or find_content_problems(path)",
        "find_problems(path)",
    ),
    Mutant(
        "content: the trainer does not look into files",
        "train.attempt",
        "store.load_latest(checkpoint_content.find_problems)",
        "store.load_latest()",
    ),
    Mutant("checkpoints: a link stays", "train.checkpoint", '".removing-*", f".{LATEST}*")', '".removing-*")'),
    Mutant(
        "rights: events are written through a link",
        "runs.atomic_io",
        "flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)",
        "flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)",
    ),
    Mutant(
        "rights: checkpoints that are a broken link are found by the trainer only",
        "runs.directory",
        "if os.path.lexists(checkpoints) and",
        "if os.path.exists(checkpoints) and",
    ),
    Mutant(
        "rights: a checkpoint folder without permission is an empty one",
        "runs.checkpoint_files",
        "except (FileNotFoundError, NotADirectoryError):\n        return []",
        "except OSError:\n        return []",
    ),
    Mutant(
        "data: a text that is removed while it is read is a bug",
        "data.sources.local",
        "    except OSError as error:\n        reason = ",
        "    except BlockingIOError as error:\n        reason = ",
    ),
    Mutant(
        "checkpoints: a save removes its own checkpoint",
        "train.checkpoint",
        "        permanent.add(saved_step)\n",
        "",
    ),
    Mutant(
        "data: a damaged record of progress is read",
        "data.build_shards",
        "if state.keys() == first.keys() and all(",
        "if state.keys() or all(",
    ),
    Mutant(
        "data: a cache folder may be a file",
        "data.dataset",
        "if os.path.lexists(folder) and not folder.is_dir():",
        "if False:",
    ),
    Mutant(
        "checkpoints: what cannot be removed blocks the temporary folder",
        "train.checkpoint",
        "number = find_free_number(self.get_temporary_path(step))",
        "number = 0",
    ),
    Mutant(
        "checkpoints: an old checkpoint that cannot be removed makes the new one fail",
        "train.checkpoint",
        "warn_of_remainder(renamed if renamed.exists() else path, error)",
        "raise",
    ),
    Mutant(
        "checkpoints: a file instead of the folder",
        "train.checkpoint",
        "except (FileExistsError, NotADirectoryError):",
        "except NotADirectoryError:",
    ),
    Mutant(
        "checkpoints: a state of another step",
        "runs.checkpoint_files",
        "return None if state_step in (None, step) else",
        "return None if True else",
    ),
    Mutant(
        "content: weights may be integers",
        "train.checkpoint_content",
        "if dtype != _WEIGHT_TYPE or 0 in shape:",
        "if 0 in shape:",
    ),
    Mutant(
        "content: an optimizer needs no random states",
        "train.checkpoint_content",
        '    _check_rng(_get_mapping(content, "rng"))\n',
        "",
    ),
    Mutant(
        "content: losses of the guard may be anything",
        "train.checkpoint_content",
        "if not isinstance(losses, list) or not all(map(is_finite, losses)):",
        "if not isinstance(losses, list):",
    ),
    Mutant("content: code without a source", "train.checkpoint_content", 'if "source" not in state["code"]:', "if False:"),
    # Suspension.
    Mutant(
        "checks: a suspension is reported by the first heartbeat after it",
        "health.heartbeat_relations",
        "elapsed = times[2:] - times[:-2]",
        "elapsed = times[2:] - times[1:-1]",
    ),
    Mutant(
        "suspension: SIGCONT takes any earlier gap",
        "train.telemetry.awake_clock",
        "if time.monotonic() - self._gap_end < GAP_AGE_S:",
        "if True:",
    ),
    Mutant(
        "suspension: a clock without ticks was suspended",
        "train.telemetry.awake_clock",
        "        if not self._is_ticking:\n            return\n",
        "",
    ),
    Mutant("suspension: counted twice", "train.telemetry.awake_clock", "            self._gap_s = 0.0\n", ""),
    Mutant(
        "suspension: a batch is late",
        "data.prefetch",
        "min(now - last_poll, MAX_POLL_S)",
        "now - last_poll",
    ),
    # Folders of text.
    Mutant(
        "folders: a link takes the name of its folder",
        "data.file_search",
        "(self._links if path.is_symlink() and not ignore_match else self.folders).append((path, inner))",
        "self.folders.append((path, inner))",
    ),
    Mutant(
        "folders: links are not followed",
        "data.file_search",
        "if is_folder and (inner",
        "if is_folder and (ignore_match or not path.is_symlink()) and (inner",
    ),
    Mutant(
        "folders: a second name is not read for another part of the pattern",
        "data.file_search",
        "if positions <= seen:",
        "if seen:",
    ),
    Mutant(
        "folders: hidden ones are left out in silence",
        "data.file_search",
        "self.matches.left_out.append((folder / name, HIDDEN))",
        "pass",
    ),
    Mutant(
        "folders: a folder that is not searched is left out in silence",
        "data.file_search",
        "self.matches.left_out.append((path, _describe(error)))",
        "pass",
    ),
    Mutant(
        "folders: an unreadable file is read",
        "data.sources.local",
        "if not os.access(file, os.R_OK)]",
        "if False]",
    ),
    Mutant(
        "folders: a link to nothing is left out in silence",
        "data.file_search",
        "return None, NO_TARGET if path.is_symlink() else None",
        "return None, None",
    ),
    # Weights that are read directly.
    Mutant(
        "cached path: hooks that were added later are lost",
        "inference.plain_weights",
        "            and not any(self._hooks)\n",
        "",
    ),
    Mutant(
        "cached path: an exchanged weight is not seen",
        "inference.plain_weights",
        "            and all(map(is_, weights, self._weights))\n            and self._get_addresses() == self._addresses\n",
        "",
    ),
    # Checkpoints with other values or another configuration.
    Mutant(
        "weights: NaN with a sign passes",
        "runs.finite_weights",
        "(values & exponent) == exponent",
        "(values >> (8 * values.itemsize - 1) == 0) & ((values & exponent) == exponent)",
    ),
    Mutant(
        "weights: only the first chunk is checked",
        "runs.finite_weights",
        "for first in range(0, n_values, CHUNK_VALUES):",
        "for first in range(0, min(n_values, CHUNK_VALUES), CHUNK_VALUES):",
    ),
    Mutant(
        "content: weights without moments start with new ones",
        "train.checkpoint_content",
        "missing = sorted(trained - kinds.keys())",
        "missing = sorted(trained) if not kinds else []",
    ),
    Mutant(
        "content: Muon has moments of its own for every weight",
        "train.checkpoint_content",
        "if has_muon and is_muon_weight(name)",
        "if has_muon",
    ),
    Mutant(
        "content: moments of frozen weights are expected",
        "train.checkpoint_content",
        'if trainable == "all" or is_indexer_weight(name)',
        "",
    ),
    Mutant(
        "health: only the first tensor of sharded weights is read",
        "health.step_accounting",
        "return next(filter(None, problems), None)",
        "return next(problems)",
    ),
    Mutant(
        "checkpoint: a second moment may be negative",
        "train.checkpoint_content",
        '("exp_avg_sq", "step")',
        '("step",)',
    ),
    Mutant(
        "load: a run that may be resumed is refused",
        "inference.load",
        "if isinstance(trajectory, dict) else",
        "if False else",
    ),
    Mutant(
        "load: an edited configuration passes if the shapes fit",
        "inference.load",
        "    if differences:\n",
        "    if False:\n",
    ),
    # Parameters of notebooks, and names in tables.
    Mutant(
        "parameters: a section with a number that is not finite is no mapping",
        "workbook.parameters",
        "return ast.Constant(float(ast.literal_eval(node.args[0])))",
        'raise ValueError("not a literal")',
    ),
    Mutant("parameters: a count may be 0", "workbook.parameters", "else value > 0)", "else value >= 0)"),
    Mutant(
        "tables: a line feed breaks a row",
        "runs.text_output",
        '{**_CONTROL, ord("\\t"): "\\\\t", ord("\\n"): "\\\\n"}',
        "_CONTROL",
    ),
    # Other holes in the tests.
    Mutant(
        "stop: the first two bytes of a stop text are enough",
        "inference.generate",
        "any(list(tokens[-len(sequence) :]) == sequence for sequence in self._sequences)",
        "any(list(tokens[-len(sequence) :])[:2] == sequence[:2] for sequence in self._sequences)",
    ),
    Mutant(
        "stop: the last two bytes of a stop text are enough",
        "inference.generate",
        "any(list(tokens[-len(sequence) :]) == sequence for sequence in self._sequences)",
        "any(list(tokens[-len(sequence[-2:]) :]) == sequence[-2:] for sequence in self._sequences)",
    ),
    Mutant(
        "recall: facts repeat after 4,096 sequences",
        "data.recall.needle_insertion",
        "np.array([seed, sequence], np.uint64)",
        "np.array([seed, sequence % 4096], np.uint64)",
    ),
    Mutant(
        "indexer: its loss reaches the trunk through packed documents",
        "model.indexer",
        "self.qk(x.detach())",
        "self.qk(x if is_document_start is not None else x.detach())",
    ),
]
