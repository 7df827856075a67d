"""One engine scheduler: chunked prefill, continuous-batching decode, KV memory and preemption, in simulated time.

Work is done in steps, as in the emulated engine: a step computes one chunk of the prompts and extensions under way and
one token of every decoding sequence. Steps that differ in nothing but the length of the contexts are done together
(`sim/steps.py`): while only decoding goes on, the next event is the first sequence's end or full memory, however many
tokens away. Work that arrives meanwhile joins at the end of the step in progress, as in a real engine.

INV-SIM-ENGINE-1: the KV memory in use never exceeds the capacity.
INV-SIM-ENGINE-2: a sequence makes exactly the tokens that it was asked for, unless it is stopped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from pdrelay.perf.instance import InstanceProfile
from pdrelay.perf.profile import ForwardCost
from pdrelay.sim.events import Event, Events
from pdrelay.sim.gaps import Gaps
from pdrelay.sim.steps import steps_seconds, steps_within
from pdrelay.sim.work import Forward, Sequence, stale


class Engine:
    """The scheduler of one data-parallel rank."""

    def __init__(self, events: Events, profile: InstanceProfile, slowdown: Callable[[], float] | None = None) -> None:
        """`slowdown`: how much longer a step takes now, because others use the same cores."""
        self.profile = profile
        self._events, self._slowdown = events, slowdown
        cost = profile.decode
        self._fixed, self._per_sequence, self._per_token = cost.fixed, cost.per_sequence, cost.per_context_token
        self._capacity = profile.kv_capacity / profile.kv_per_token  # in tokens
        self._sequence_overhead = profile.kv_fixed / profile.kv_per_token
        self._forwards: deque[Forward] = deque()
        self._waiting: deque[Sequence | Forward] = deque()
        self._ends: list[tuple[int, int, Sequence]] = []
        self._joined: list[Sequence] = []  # newest last; the next to be preempted
        self._number = 0
        self._batch = 0
        self._context = 0  # tokens in all decoding contexts
        self._reserved = 0.0  # tokens of forwards
        self._steps = 0  # decode steps that have ended
        self._leaving: list[Sequence] = []
        # The segment of steps under way.
        self._event: Event | None = None
        self._start = self._first = self._growth = 0.0
        self._count = 0
        self._chunks: list[tuple[Forward, int]] = []
        self._gaps = Gaps()
        self.busy_seconds = 0.0
        self.tokens_made = 0
        self.preemptions = 0
        self.alive = True

    # ---- what the others see ----

    @property
    def running(self) -> int:
        """Requests that compute."""
        return self._batch + len(self._forwards)

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> float:
        """KV memory in use, in tokens."""
        batch = self._batch
        if not batch:
            return self._reserved
        return self._context + batch * (self._steps_done() + self._sequence_overhead) + self._reserved

    @property
    def kv_usage(self) -> float:
        """Share of the KV memory in use."""
        return self.used_tokens / self._capacity

    @property
    def working(self) -> bool:
        """True while a step is computed."""
        return self._event is not None

    @property
    def step_seconds(self) -> float:
        """Time of a decode step of those who run now."""
        return self.profile.decode_step_seconds(max(1, self._batch), self._context + self._batch * self._steps_done())

    def fits(self, tokens: int) -> bool:
        """True when a request of `tokens` tokens fits into the empty engine."""
        return tokens + self._sequence_overhead + 1 <= self._capacity

    def output_tokens(self) -> int:
        """Tokens made so far."""
        return self.tokens_made + self._batch * self._steps_done()

    def made(self, sequence: Sequence) -> int:
        """Tokens that `sequence` has made so far."""
        if not sequence.active:
            return sequence.made_before
        return sequence.made_before + self._steps + self._steps_done() - sequence.join_step

    # ---- work ----

    def forward(self, forward: Forward) -> None:
        """Computes known tokens, in the order in which they come."""
        self._take(forward)

    def decode(self, sequence: Sequence) -> None:
        """Decodes `sequence`, which has a token to make, as soon as there is room."""
        assert sequence.remaining > 0
        self._take(sequence)

    def stop(self, sequence: Sequence) -> int:
        """Ends `sequence` early; returns the tokens that it has made. It leaves at the end of the step in progress."""
        made = self.made(sequence)
        sequence.stopped = True
        if sequence.active:
            self._leaving.append(sequence)
            self._interrupt()
        return made

    def fail(self) -> None:
        """Loses everything; whoever waits for something here is told by the caller."""
        if self._event is not None:
            self._event.cancel()
            self._event = None
        for _, _, sequence in self._ends:
            sequence.active = False
        self._forwards.clear()
        self._waiting.clear()
        self._ends.clear()
        self._joined.clear()
        self._leaving.clear()
        self._chunks = []
        self._batch = self._context = 0
        self._reserved = 0.0
        self.alive = False

    def _take(self, work: Sequence | Forward) -> None:
        if not self.alive:
            return  # whoever sent it learns of the failure as everybody else does
        self._waiting.append(work)
        if self._event is None:
            self._plan()
        else:
            self._interrupt()

    def replan(self) -> None:
        """The slowdown has changed: it counts from the next step on."""
        if self._event is not None:
            self._interrupt()

    # ---- segments of steps ----

    def _steps_done(self) -> int:
        """Steps of the segment under way that have ended."""
        if self._event is None or self._chunks:
            return 0
        return min(self._count, steps_within(self._first, self._growth, self._events.now - self._start))

    def _interrupt(self) -> None:
        """Ends the segment with the step in progress, so that something can change."""
        if self._chunks:
            return  # one step already
        count = self._steps_done() + 1
        if count < self._count and self._event is not None:
            self._count = count
            self._event.cancel()
            end = self._start + steps_seconds(self._first, self._growth, count)
            self._event = self._events.at(max(end, self._events.now), self._end)

    def _plan(self) -> None:
        """Starts the next segment."""
        self._admit()
        if not self._batch and not self._forwards:
            self._event = None
            return
        slow = self._slowdown() if self._slowdown is not None else 1.0
        step = 0.0
        if self._batch:
            step = self._fixed + self._per_sequence * self._batch + self._per_token * self._context
        self._start = self._events.now
        self._chunks = self._next_chunks()
        if self._chunks:
            seconds = step + sum(self._chunk_seconds(forward, tokens) for forward, tokens in self._chunks)
            self._first, self._growth, self._count = seconds * slow, 0.0, 1
        else:
            self._first, self._growth = step * slow, self._per_token * self._batch * slow
            self._count = self._free_steps()
        for sequence in self._fresh():
            sequence.first_token = self._start + self._first
        self._event = self._events.after(steps_seconds(self._first, self._growth, self._count), self._end)

    def _fresh(self) -> list[Sequence]:
        """Sequences that join with this segment."""
        fresh = []
        for sequence in reversed(self._joined):
            if sequence.join_step != self._steps or not sequence.active:
                break
            if sequence.first_token < 0:
                fresh.append(sequence)
        return fresh

    def _free_steps(self) -> int:
        """Steps until a sequence ends or memory is full."""
        room = int((self._capacity - self.used_tokens) // self._batch)
        return max(1, min(self._ends[0][0] - self._steps, room))

    def _next_chunks(self) -> list[tuple[Forward, int]]:
        budget = self.profile.prefill_chunk
        chunks = []
        for forward in self._forwards:
            if forward.started < 0:
                forward.started = self._events.now
            tokens = min(forward.tokens - forward.done, budget)
            chunks.append((forward, tokens))
            if forward.on_chunk is not None:
                forward.on_chunk(forward.done + tokens)
            budget -= tokens
            if budget <= 0:
                break
        return chunks

    def _chunk_seconds(self, forward: Forward, tokens: int) -> float:
        """Time of a chunk, such that all chunks take as long as one forward would."""
        profile, done, behind = self.profile, forward.done, forward.behind
        cost = profile.extend if forward.extend else profile.prefill
        if isinstance(cost, ForwardCost):
            pairs = tokens * (behind + done) + tokens * (tokens + 1) / 2
            return (
                cost.per_token * tokens + cost.per_pair * pairs + (0.0 if done else self._fixed_seconds(forward, cost))
            )
        before = profile.prefill_seconds(done, behind)
        return profile.prefill_seconds(done + tokens, behind) - before

    def _fixed_seconds(self, forward: Forward, cost: ForwardCost) -> float:
        """An extension rides along with a decode step: the weights are read once for both."""
        shared = self._fixed if forward.extend and self._batch else 0.0
        return max(0.0, cost.fixed - shared)

    def _end(self) -> None:
        """A segment has ended."""
        self._event = None
        chunks, self._chunks = self._chunks, []
        count = self._count
        self.busy_seconds += self._events.now - self._start
        if self._batch:
            self._steps += count
            self._context += self._batch * count
            self.tokens_made += self._batch * count
            self._gaps.note(self._first + self._growth * (count - 1), self._steps, self._oldest_join)
        ended = self._ended()
        finished = [forward for forward, tokens in chunks if self._computed(forward, tokens)]
        for forward in finished:
            forward.on_done()
        for sequence in ended:
            sequence.on_end()
        if self._event is None and self.alive:
            self._plan()

    def _computed(self, forward: Forward, tokens: int) -> bool:
        """Notes a chunk; True when it was the last."""
        forward.done += tokens
        if forward.done < forward.tokens and not forward.cancelled:
            return False
        self._forwards.remove(forward)
        self._reserved -= forward.reserve + self._sequence_overhead
        return not forward.cancelled

    def _ended(self) -> list[Sequence]:
        """Takes out the sequences that have made their last token, or were stopped."""
        ended = []
        while self._ends and (self._ends[0][0] <= self._steps or stale(self._ends[0])):
            entry = heapq.heappop(self._ends)
            sequence = entry[2]
            if not stale(entry):
                made = self.made(sequence)
                assert made == sequence.remaining, f"INV-SIM-ENGINE-2: {made} of {sequence.remaining}"
                self._leave(sequence)
                if not sequence.stopped:
                    ended.append(sequence)
        for sequence in self._leaving:
            if sequence.active:
                self._leave(sequence)
        self._leaving.clear()
        if len(self._joined) > 2 * self._batch + 16:
            self._joined = [sequence for sequence in self._joined if sequence.active]
        return ended

    def _oldest_join(self) -> int:
        """The step with which the oldest of those who run joined."""
        return min((s.join_step for s in self._joined if s.active), default=self._steps)

    def _leave(self, sequence: Sequence) -> None:
        made = self._steps - sequence.join_step
        self._batch -= 1
        self._context -= sequence.context + made
        sequence.largest_gap = max(sequence.largest_gap, self._gaps.longest_since(sequence.join_step))
        sequence.made_before += made
        sequence.active = False

    # ---- memory ----

    def _admit(self) -> None:
        """Takes in what waits, first come, first served; makes room for one more step of those who run."""
        while self._batch and self.used_tokens + self._batch > self._capacity:
            self._preempt()
        while self._waiting:
            work = self._waiting[0]
            if isinstance(work, Sequence):
                if work.stopped:
                    self._waiting.popleft()
                    continue
                if not self._has_room(work.context + 1) or self.running >= self.profile.max_num_seqs:
                    return
                self._waiting.popleft()
                self._join(work)
            else:
                if not self._has_room(work.reserve) or self.running >= self.profile.max_num_seqs:
                    return
                self._waiting.popleft()
                if not work.cancelled:
                    self._reserved += work.reserve + self._sequence_overhead
                    self._forwards.append(work)
        assert self.used_tokens <= self._capacity + 1e-6, "INV-SIM-ENGINE-1"

    def _has_room(self, tokens: int) -> bool:
        needed = tokens + self._sequence_overhead + self._batch  # and one more step of those who run
        return self.used_tokens + needed <= self._capacity

    def _join(self, sequence: Sequence) -> None:
        sequence.active = True
        sequence.join_step = self._steps
        sequence.finish_step = self._steps + sequence.remaining - sequence.made_before
        self._batch += 1
        self._context += sequence.context
        self._number += 1
        heapq.heappush(self._ends, (sequence.finish_step, self._number, sequence))
        self._joined.append(sequence)

    def _preempt(self) -> None:
        """The newest gives up its memory. Its prompt comes back from the depot, what it has made is computed anew."""
        sequence = self._joined.pop()
        while not sequence.active:
            sequence = self._joined.pop()
        before = sequence.made_before
        self._leave(sequence)
        sequence.context += sequence.made_before - before
        sequence.preemptions += 1
        self.preemptions += 1
        if sequence.stopped:
            return
        made = sequence.made_before

        def again() -> None:
            self._waiting.appendleft(sequence)

        self._waiting.appendleft(
            Forward(made, sequence.context - made, again, extend=True, reserve=sequence.context) if made else sequence
        )
