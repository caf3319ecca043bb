"""The figures of an engine.

Invariants: counts of what has been done only grow; free, cached and live blocks make up the pool.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class EngineStats:
    """What an engine has done since it was built, and where it stands.

    Attributes:
      num_submitted, num_finished: requests.
      num_preemptions: sequences that had to give up their slot.
      prompt_tokens, new_tokens: of sequences that started; tokens generated.
      found_tokens: of the prompt tokens, those that were in the cache already.
      resumed_tokens: tokens, generated ones among them, that sequences found again when they went on after a preemption.
      dispatches, num_compiles: calls of compiled programs, and compiles.
      compile_s, device_s, host_s: seconds of compiling, of waiting for the device, and of everything else in `step`.
      num_drafted, num_accepted: drafted tokens checked, and right.
      num_waiting, num_running: sequences now.
      num_free, num_cached, num_blocks: blocks now; the live ones are the rest.
    """

    num_submitted: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    resumed_tokens: int = 0
    new_tokens: int = 0
    dispatches: int = 0
    num_compiles: int = 0
    compile_s: float = 0.0
    device_s: float = 0.0
    host_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_free: int = 0
    num_cached: int = 0
    num_blocks: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were right; 0 where none was checked."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def num_live(self) -> int:
        """Blocks that running sequences hold."""
        return self.num_blocks - self.num_free - self.num_cached
