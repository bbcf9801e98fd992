"""Root file systems: one per suite, and one more per set of extra packages, cached by their recipe."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from machine import TestbedError, apt_options, apt_sources, locked, run

RECIPE = 4  # raise it when this file changes what an image holds
BASE = ("systemd", "systemd-sysv", "dbus", "openssh-server", "python3")
# Nobody reads them in a host, and a fifth of the image need not be copied for each one.
EXCLUDED = ("doc", "man", "info", "locale")
MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "fstrim.timer", "systemd-networkd-wait-online.service")
# systemd-nspawn builds a /sys of selected folders; a real one has /sys/module, too. Before networkd, which waits for
# udev (there is none here) when it meets a writable /sys.
SYSFS_UNIT = """\
[Unit]
Description=Show the loaded kernel modules as a real machine does
DefaultDependencies=no
Before=sysinit.target systemd-networkd.service gpusim-mounts.service
ConditionPathExists=!/sys/module

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=mkdir -p /run/testbed-sys
ExecStart=mount -t sysfs -o ro,nosuid,nodev,noexec sysfs /run/testbed-sys
ExecStart=mount -o remount,rw /sys
ExecStart=mkdir /sys/module
ExecStart=mount --bind /run/testbed-sys/module /sys/module
ExecStart=mount -o remount,ro /sys
ExecStart=umount --lazy /run/testbed-sys
"""


def cache_dir() -> Path:
    """`GPUFLEET_CACHE`, else `.cache` of the checkout."""
    default = Path(__file__).resolve().parents[2] / ".cache"
    return Path(os.environ.get("GPUFLEET_CACHE") or default) / "testbed"


def image(suite: str, packages: Sequence[str] = ()) -> Path:
    """The folder of a finished image; built when the cache has none with this recipe."""
    sources = apt_sources(suite)
    extra = sorted(set(packages) - set(BASE))
    recipe = json.dumps([RECIPE, suite, BASE, extra, sources, apt_options(), EXCLUDED, MASKED])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    target = cache_dir() / "images" / f"{suite}-{digest}"
    if target.is_dir():
        return target
    base = image(suite) if extra else None
    with locked(cache_dir() / "images.lock"):
        for dead in (cache_dir() / "images").glob("*.partial"):
            shutil.rmtree(dead)
        if target.is_dir():
            return target
        start = time.monotonic()
        partial = target.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        if base:
            _extend(base, partial, extra)
        else:
            _bootstrap(suite, sources, partial)
        partial.rename(target)
        what = f"{suite}" + (f" with {', '.join(extra)}" if extra else "")
        print(f"testbed: image {what} built in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return target


def _bootstrap(suite: str, sources: Sequence[str], target: Path) -> None:
    # Its own mount and pid namespaces: a killed build leaves no mount and no process behind.
    run(
        [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
            *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={','.join(BASE)}"),
            *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in EXCLUDED),
            *(f"--aptopt={line.rstrip(';')}" for line in apt_options()),
            *(suite, str(target), *sources),
        ]
    )
    for key in (target / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    (target / "etc/machine-id").write_text("")
    (target / "etc/dpkg/dpkg.cfg.d/testbed").write_text("force-unsafe-io\n")
    systemd = target / "etc/systemd/system"
    for unit in MASKED:
        (systemd / unit).unlink(missing_ok=True)
        (systemd / unit).symlink_to("/dev/null")
    (systemd / "testbed-sysfs.service").write_text(SYSFS_UNIT)
    (systemd / "sysinit.target.wants").mkdir(exist_ok=True)
    (systemd / "sysinit.target.wants/testbed-sysfs.service").symlink_to("../testbed-sysfs.service")
    wants = systemd / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    for unit in ("systemd-networkd.service", "ssh.service"):
        if not (wants / unit).is_symlink():
            (wants / unit).symlink_to(f"/lib/systemd/system/{unit}")


def _extend(base: Path, target: Path, packages: Sequence[str]) -> None:
    run(["cp", "-a", "--reflink=auto", str(base), str(target)])
    inside = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--pipe", "--resolv-conf=copy-host"]
    apt = ["apt-get", "-q", "-o", "APT::Install-Recommends=false"]
    steps = (
        (*apt, "update"),
        (*apt, "install", "-y", *packages),
        ("apt-get", "clean"),
        ("rm", "-r", "/var/lib/apt/lists"),
    )
    script = " && ".join(shlex.join(step) for step in steps)
    env = ["--setenv=DEBIAN_FRONTEND=noninteractive"]
    run([*inside, *env, f"--machine=testbed-{os.getpid()}", "-D", str(target), "sh", "-c", script])
    for key in (target / "etc/ssh").glob("ssh_host_*"):
        key.unlink()


def prune() -> int:
    """Remove every image; return how many. Fleets that are up keep their own copies."""
    folder = cache_dir() / "images"
    found = [item for item in folder.iterdir() if item.is_dir()] if folder.is_dir() else []
    with locked(cache_dir() / "images.lock"):
        for item in found:
            shutil.rmtree(item)
    return len(found)


__all__ = ["TestbedError", "cache_dir", "image", "prune"]
