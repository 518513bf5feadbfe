"""The cells of notebooks 04 and 05 below their parameters, from the configuration to the verdict: each cell is one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from IPython.display import display
from matplotlib.figure import Figure

import nsa_lab.figures as figures
from nsa_lab.config import RunConfig
from nsa_lab.figures.loss import plot_sweep
from nsa_lab.health.sweep_results import compute_curve
from nsa_lab.runs.history import History, have_different_eval_texts
from nsa_lab.runs.summary import format_settings, format_steps
from nsa_lab.workbook import follow_run, notebook, samples
from nsa_lab.workbook.display import show_figure


@dataclass
class TrainingSession:
    """One run in a training notebook. `start` finds or creates the run, and the other methods read it.

    A problem that the user can solve stops the cell with one line, a `Stop`.
    """

    config: RunConfig
    run_dir: str
    outputs: str
    new_run: bool
    prompt: str
    sample_tokens: int
    reference: str
    _run: Path | None = field(default=None, init=False)
    _history: History | None = field(default=None, init=False)

    @property
    def run(self) -> Path:
        """Return the run's directory. Raises `Stop` before `start`."""
        if self._run is None:
            raise notebook.Stop("there is no run yet: run the cell that starts it first")
        return self._run

    @property
    def history(self) -> History:
        """Return the run's record, read when following ended or at the first use."""
        if self._history is None:
            self._history = History.read(self.run)
        return self._history

    def print_settings(self) -> None:
        """Print the settings, the shape of the untrained model, and the number of tokens of a step and of all steps."""
        train = self.config.train
        print(f"{self.config.name}: {format_settings(self.config)}")
        # This copy of the model is on the CPU. The run's record has the backends that the trainer uses.
        print(samples.build_untrained_model(self.config).describe(train.longest_stage.seq_len).partition("; backends")[0])
        print(f"{format_steps(train)} tokens: {train.tokens:,} tokens in all")

    def start(self) -> None:
        """Start the trainer, attach to it, resume it, or report that the run is finished (see `notebook.start_run`)."""
        self._run = notebook.start_run(self.config, self.run_dir, outputs=self.outputs, new_run=self.new_run)
        self._history = None

    async def follow(self) -> None:
        """Show the run until its trainer has ended. Interrupting ends the following, never the run."""
        await follow_run.follow_run(self.run)
        self._history = None

    def show_overview(self) -> None:
        """Show the run at a glance: loss, gates, selection and throughput."""
        show_figure(figures.plot_overview(self.history))

    def show_reference(self) -> None:
        """Plot the validation loss of this run and of the reference run. Print a line if they cannot be compared."""
        if not self.reference:
            print('no reference run; set reference = "RUN", a directory or id')
            return
        runs = [self.history, History.read(notebook.find_run(self.reference))]
        if unevaluated := [run.run for run in runs if not any(event["step"] for event in run.evaluations)]:
            print(f"not plotted, because not evaluated after training started: {', '.join(unevaluated)}")
        elif have_different_eval_texts(runs):
            print(f"not compared: {runs[1].run} was evaluated on another text or at another length")
        else:
            show_figure(
                plot_sweep([compute_curve(run.run, [run]) for run in runs], title="Validation compared with another run")
            )

    def show_optimizer(self) -> None:
        """Plot learning rate and gradient norm over steps."""
        show_figure(figures.plot_learning_rate(self.history))

    def show_gates(self) -> None:
        """Plot each branch's share of the gates, and the gate entropy, over steps."""
        self._show_branch_plot(figures.plot_gate_shares)

    def show_gates_by_layer(self) -> None:
        """Plot the gate shares of each layer at the first and at the last recorded step."""
        self._show_branch_plot(figures.plot_gates_by_layer)

    def show_selection(self) -> None:
        """Plot statistics of the selected blocks over steps."""
        self._show_branch_plot(figures.plot_selection_statistics)

    def show_branch_norms(self) -> None:
        """Plot the norm of each branch's output over steps."""
        self._show_branch_plot(figures.plot_branch_norms)

    def _show_branch_plot(self, plot: Callable[[History], Figure]) -> None:
        if self.config.model.attention == "nsa":
            show_figure(plot(self.history))
        else:
            print("a dense model has no branches")

    def show_throughput(self) -> None:
        """Plot tokens per second, time spent waiting for data, and memory."""
        show_figure(figures.plot_throughput(self.history))

    def show_samples(self) -> None:
        """Show held-out text next to samples of the untrained model and of the newest checkpoint."""
        untrained = samples.build_untrained_model(self.config)
        texts = {
            "held-out text": samples.read_held_out_text(self.history, self.sample_tokens),
            "untrained": samples.sample_model(self.config, untrained, self.prompt, self.sample_tokens),
            f"after {self.history.last_step:,} steps": samples.sample_run(self.run, self.prompt, self.sample_tokens),
        }
        display(samples.TextColumns(texts))

    def print_configuration(self) -> None:
        """Print every value of the configuration."""
        print(self.config.to_yaml())

    def print_verdict(self) -> None:
        """Print the checks of the run. Raises `Stop` if the run ended badly, so that the notebook fails too."""
        notebook.print_final_verdict(self.run)


def configure_training(
    name: str,
    sections: dict[str, dict[str, Any]],
    *,
    run_dir: str = "",
    outputs: str = "",
    new_run: bool = False,
    prompt: str,
    sample_tokens: int,
    reference: str = "",
    description: str = "",
) -> TrainingSession:
    """Return the session for the parameters of a training notebook. Raises `Stop`.

    `sections` are applied on top of `params/<name>.yaml`; with `run_dir`, the run's configuration is used. The
    notebook explains the other parameters.
    """
    config = notebook.load_configuration(name, sections, run_dir)
    if description:
        config = config.model_copy(update={"description": description})
    return TrainingSession(config, run_dir, outputs, new_run, prompt, sample_tokens, reference)
