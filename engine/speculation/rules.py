"""Every threshold of speculation; what they mean is told in `engine.speculation.controller`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationRules:
    """Every threshold of the controller."""

    max_temperature: float = 0.7  # above it a request does not speculate
    first_drafts: int = 4
    retry_drafts: int = 2  # at most, until the window after a retry is full
    max_drafts: int = 8
    window: int = 10  # attempts
    off_below: float = 0.5  # acceptance over the window
    stops_always: bool = False  # below it, even if drafts pay by the fitted costs
    fewer_below: float = 0.6
    back_above: float = 0.6  # of the first window after a retry
    more_above: float = 0.8
    retry_steps: int = 32  # of a request
    max_retry_steps: int = 1024
    min_gain: float = 1.03  # predicted, over the plain step; with less there are no drafts
    # The same of more than `trial_rows` rows: luck parts them, and the last come in smaller steps.
    many_gain: float = 1.07
    fair_slack: float = 0.1  # of the most tokens per second, given up for as many drafts a row
    trial_rows: int = 16  # requests at a time that are tried where drafts do not pay yet
    trial_drafts: int = 2  # of each of these, where they do not pay at once
    prompt_slack: float = 0.05  # share of the plain step that drafts may add where prompts wait
    purse_steps: float = 1.25  # plain steps that may be lost at once
    saved_steps: float = 16.0  # plain steps' time that gains are kept of, for losses later
    refill: float = 0.005  # of a plain step, for each step
    most_times: float = 4.0  # its prediction, that a step with drafts may count as


DEFAULT_RULES = SpeculationRules()
