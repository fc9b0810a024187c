import subprocess
import sys

from nonet.deploy.run.memory import PeakMemory

MIB = 1 << 20
# A grandchild that holds 64 MiB, says so and goes.
HOLDS = "import sys, time; held = b'1' * (64 << 20); print(len(held), flush=True); time.sleep(0.5)"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLDS!r}], check=True)"


def test_the_peak_counts_what_descendants_held_and_gave_back():
    with PeakMemory(interval_s=0.05) as memory:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.3)"], check=True)
        before = memory.peak_bytes
        subprocess.run([sys.executable, "-c", CHILD], check=True)
    assert 0 < before < memory.peak_bytes - 60 * MIB
    assert memory.peak_bytes < before + 200 * MIB
