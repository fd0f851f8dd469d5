"""Time for tests: it passes only when somebody sleeps, and links on it do not depend on the machine."""

from gradwire.tools.launch.link import EmulatedLink


class FakeClock:
    """`sleep` returns at once; the clock moves on by that much, unless it `runs` not at all."""

    def __init__(self, runs=True):
        self.now, self.slept, self._runs = 0.0, [], runs

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds if self._runs else 0.0


class TimelessLink(EmulatedLink):
    """An emulated link on a fake clock. What collectives take in real time does not count."""

    def __init__(self, link, **options):
        self.clock = FakeClock(**options)
        super().__init__(link, self.clock, self.clock.sleep)

    def hold(self, collective, size, sent_bytes, taken_s):
        return super().hold(collective, size, sent_bytes, 0.0)
