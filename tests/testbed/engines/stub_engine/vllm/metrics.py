"""Counters under vLLM's own metric names."""

import contextlib
import threading
import time

from vllm import VERSION

BUCKETS = (0.001, 0.01, 0.1, 1.0, 10.0)


class Metrics:
    """Counts of one server, rendered as Prometheus text."""

    def __init__(self, model, figures):
        self.labels = f'model_name="{model}"' if VERSION < (0, 8, 0) else f'engine="0",model_name="{model}"'
        self.lock, self.running = threading.Lock(), 0
        self.prompt, self.generated, self.finished, self.seconds = 0, 0, 0, []
        self.blocks = figures["tokens"] // 16

    @contextlib.contextmanager
    def request(self, prompt, generated):
        """Count one request while and after it runs."""
        began = time.monotonic()
        with self.lock:
            self.running += 1
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1
                self.prompt, self.generated, self.finished = (
                    self.prompt + prompt,
                    self.generated + generated,
                    self.finished + 1,
                )
                self.seconds.append(time.monotonic() - began)

    def text(self):
        """The /metrics page."""
        usage = "kv_cache_usage_perc" if VERSION >= (0, 10, 0) else "gpu_cache_usage_perc"
        gauges = {"num_requests_running": self.running, "num_requests_waiting": 0, usage: 0.0}
        counters = {
            "num_preemptions_total": 0,
            "prompt_tokens_total": self.prompt,
            "generation_tokens_total": self.generated,
        }
        if VERSION >= (0, 8, 0):
            counters.update(prefix_cache_queries_total=self.prompt, prefix_cache_hits_total=0)
        lines = []
        for kind, values in (("gauge", gauges), ("counter", counters)):
            for name, value in values.items():
                lines += [
                    f"# TYPE vllm:{name} {kind}",
                    f"vllm:{name}{{{self.labels}}} {float(value)}",
                ]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason in ("stop", "length", "abort"):
            value = float(self.finished if reason == "length" else 0)
            lines.append(f'vllm:request_success_total{{finished_reason="{reason}",{self.labels}}} {value}')
        per_token = "inter_token_latency_seconds" if VERSION >= (0, 11, 0) else "time_per_output_token_seconds"
        names = ("time_to_first_token_seconds", per_token, "e2e_request_latency_seconds", "request_queue_time_seconds")
        for name in (
            *names,
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
        ):
            lines += self.histogram(name)
        if VERSION >= (0, 6, 0):
            lines += ["# TYPE vllm:cache_config_info gauge"]
            lines += [f'vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{self.blocks}"}} 1.0']
        return "\n".join(lines) + "\n"

    def histogram(self, name):
        """One histogram over the request times."""
        lines = [f"# TYPE vllm:{name} histogram"]
        for bound in BUCKETS:
            count = float(sum(second <= bound for second in self.seconds))
            lines.append(f'vllm:{name}_bucket{{{self.labels},le="{bound}"}} {count}')
        count = float(len(self.seconds))
        lines.append(f'vllm:{name}_bucket{{{self.labels},le="+Inf"}} {count}')
        return [
            *lines,
            f"vllm:{name}_count{{{self.labels}}} {count}",
            f"vllm:{name}_sum{{{self.labels}}} {sum(self.seconds)}",
        ]
