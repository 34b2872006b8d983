"""Where the seconds of a command went."""

from dither.simulation import devices


def test_spans_inside_others_count_once(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(devices.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(devices, "_compiler_spans", [])
    clock = devices.Clock()
    with clock("rounds"):
        for moment, event, seconds in (
            (102.0, "/jax/core/compile/jaxpr_trace_duration", 1.0),  # 101 to 102
            (104.0, "/jax/core/compile/jaxpr_trace_duration", 3.5),  # 100.5 to 104, around it
            (104.5, "/jax/compilation_cache/cache_retrieval_time_sec", 0.4),  # not compiling by itself
            (105.0, "/jax/core/compile/backend_compile_duration", 1.0),  # 104 to 105
        ):
            now[0] = moment
            devices._heard(event, seconds)
        now[0] = 110.0
    assert clock.report() == {"compile": 4.5, "rounds": 5.5}
