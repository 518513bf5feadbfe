"""What notebooks 03 and 04 do below their parameters, from the configuration to the verdict: each cell is one call."""

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
from nsa_lab.workbook import beside, follow_run, notebook, samples
from nsa_lab.workbook.display import show_figure


@dataclass
class TrainingSession:
    """One run as a training notebook sees it. `start` finds or makes it; what comes after reads it.

    A problem that the reader can solve ends the cell with one line, a `Stop`.
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
        """The run's directory. Raises `Stop` before `start`."""
        if self._run is None:
            raise notebook.Stop("there is no run yet: run the cell that starts it first")
        return self._run

    @property
    def history(self) -> History:
        """The run's record as it was when following ended, or when it was first asked for."""
        if self._history is None:
            self._history = History.read(self.run)
        return self._history

    def print_settings(self) -> None:
        """Print the settings, the shape of the untrained model, and what a step and all steps are in tokens."""
        train = self.config.train
        print(f"{self.config.name}: {format_settings(self.config)}")
        # This copy stands on the CPU to be asked; what the trainer's own runs on, and why, is in the run's record.
        print(samples.build_untrained_model(self.config).describe(train.longest_stage.seq_len).partition("; backends")[0])
        print(f"{format_steps(train)} tokens: {train.tokens:,} tokens in all")

    def start(self) -> None:
        """Start the trainer, attach to it, resume it, or say that the run is finished (see `notebook.start`)."""
        self._run = notebook.start_run(self.config, self.run_dir, outputs=self.outputs, new_run=self.new_run)
        self._history = None

    async def follow(self) -> None:
        """Show the run until no trainer works on it; interrupting ends the following, never the run."""
        await follow_run.follow_run(self.run)
        self._history = None

    def show_overview(self) -> None:
        """Show the run at a glance: loss, gates, selection and pace."""
        show_figure(figures.plot_overview(self.history))

    def show_reference(self) -> None:
        """Show validation beside that of the reference run, over tokens and over seconds of steps; say if there is none."""
        if not self.reference:
            print('no run to draw beside: reference = "RUN" names one, by directory or id')
            return
        runs = [self.history, History.read(notebook.find_run(self.reference))]
        if unread := [run.run for run in runs if not any(event["step"] for event in run.evaluations)]:
            print(f"not evaluated after a step, and not drawn: {', '.join(unread)}")
        elif have_different_eval_texts(runs):
            print(f"{runs[1].run} was evaluated on another text, or at another length: not compared")
        else:
            show_figure(plot_sweep([compute_curve(run.run, [run]) for run in runs], title="Validation beside another run"))

    def show_optimizer(self) -> None:
        """Show learning rate and gradient norm over steps."""
        show_figure(figures.plot_learning_rate(self.history))

    def show_gates(self) -> None:
        """Show each branch's share of the gates, and their entropy, over steps."""
        self._show_branch_plot(figures.plot_gate_shares)

    def show_gates_by_layer(self) -> None:
        """Show how each layer divides its gates, at the first reading and at the last."""
        self._show_branch_plot(figures.plot_gates_by_layer)

    def show_selection(self) -> None:
        """Show what the chosen blocks are like, over steps."""
        self._show_branch_plot(figures.plot_selection_statistics)

    def show_branch_norms(self) -> None:
        """Show how large each branch's output is, over steps."""
        self._show_branch_plot(figures.plot_branch_norms)

    def _show_branch_plot(self, draw: Callable[[History], Figure]) -> None:
        if self.config.model.attention == "nsa":
            show_figure(draw(self.history))
        else:
            print("a dense model has no branches")

    def show_throughput(self) -> None:
        """Show tokens per second, waiting for data, and memory."""
        show_figure(figures.plot_throughput(self.history))

    def show_samples(self) -> None:
        """Show held-out text beside what the model makes of the prompt, untrained and by its newest checkpoint."""
        untrained = samples.build_untrained_model(self.config)
        texts = {
            "text it never saw": beside.read_held_out_text(self.history, self.sample_tokens),
            "untrained": samples.sample_model(self.config, untrained, self.prompt, self.sample_tokens),
            f"after {self.history.last_step:,} steps": samples.sample_run(self.run, self.prompt, self.sample_tokens),
        }
        display(beside.TextColumns(texts))

    def print_configuration(self) -> None:
        """Print every value of the configuration."""
        print(self.config.to_yaml())

    def print_verdict(self) -> None:
        """Print the verdicts on the run. Raises `Stop` if it ended badly, so that the notebook says so too."""
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
) -> TrainingSession:
    """The parameters of a training notebook as a `Training`. Raises `Stop`.

    `sections` are laid over `params/<name>.yaml`; with `run_dir`, the configuration is what that run was made with. The
    parameters mean what the notebook says of them.
    """
    config = notebook.load_configuration(name, sections, run_dir)
    return TrainingSession(config, run_dir, outputs, new_run, prompt, sample_tokens, reference)
