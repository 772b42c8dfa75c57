"""What both ways of running llama.cpp report, in one form."""

import json


def tell(load, prefill, decode, streams, build):
    """Prints the figures and the memory that is resident now, as one line of JSON."""
    with open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))
    print(
        json.dumps(
            {
                "load_s": load,
                "prefill": prefill,
                "decode": decode,
                "streams": streams,
                "resident_mib": resident,
                "build": build.strip(),
            }
        )
    )
