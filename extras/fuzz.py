"""
fuzz.py — the properties of tests/test_hostile.py on many more cases.

    python -m extras.fuzz                     # 100,000 cases, about ten minutes of one core
    python -m extras.fuzz --cases 1000        # a look

Prints for each property how many generated cases it was tried on, whether one failed (with the smallest such case), and
the seconds; then the slowest function on strings of 10 MB. Ends with status 1 if any failed.
"""
import argparse
import pathlib
import sys
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from test_hostile import PROPERTIES, check, times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="in total")
    args = parser.parse_args()
    total, failures, start = 0, 0, time.monotonic()
    print(f"{'property':42} {'cases':>8} {'failures':>9} {'seconds':>8}")
    for property in PROPERTIES:
        begin, cases, failed = time.monotonic(), -(-args.cases // len(PROPERTIES)), 0
        try:
            cases = check(property, cases)
        except Exception:                           # whatever it is, it is a finding: print it and go on
            traceback.print_exc(file=sys.stdout)
            failed = 1
        total, failures = total + cases, failures + failed
        print(f"{property.__name__:42} {cases:8,} {failed:9} {time.monotonic() - begin:8.0f}", flush=True)
    print(f"{'total':42} {total:8,} {failures:9} {time.monotonic() - start:8.0f}")
    function, unit, seconds = max(times(10 * 2**20), key=lambda row: row[2])
    print(f"slowest of all functions on 10 MB: {function} on {unit!r} repeated, {seconds:.2f} s")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
