# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a driver shows outside of NVML: /proc/driver/nvidia, PCI devices, modules, device nodes.

`write_tree` derives the files from the simulator's state; `mount_all` puts them in place inside a host.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import stat
import subprocess
from pathlib import Path

State = dict  # dotted key: text

LINES_OF_PROC_DEVICES = """\
195 nvidia
195 nvidia-modeset
195 nvidiactl
508 nvidia-uvm
509 nvidia-nvswitch
510 nvidia-caps"""
PARAMETERS = {
    "ResmanDebugLevel": "4294967295",
    "RmLogonRC": "1",
    "ModifyDeviceFiles": "1",
    "DeviceFileUID": "0",
    "DeviceFileGID": "0",
    "DeviceFileMode": "438",
    "InitializeSystemMemoryAllocations": "1",
    "EnableMSI": "1",
    "EnablePCIeGen3": "0",
    "MemoryPoolSize": "0",
    "EnableGpuFirmware": "18",
    "RmProfilingAdminOnly": "1",
    "EnableStreamMemOPs": "0",
    "PreserveVideoMemoryAllocations": "0",
    "DynamicPowerManagement": "3",
    "RegistryDwords": '""',
    "RegistryDwordsPerDevice": '""',
    "ExcludedGpus": '""',
}
COVERED = ("/proc/modules", "/proc/devices", "/proc/driver", "/sys/bus/pci", "/sys/module")
REAL_MODULES = Path("/run/gpusim/sys-module")
FREEZER = Path("/run/gpusim/freezer")


def indices(values: State, group: str) -> list[int]:
    """Numbers n for which there is any key `<group>.<n>.…`."""
    return sorted({int(k.split(".")[1]) for k in values if re.match(rf"{group}\.\d+\.", k)})


def driver_loaded(values: State) -> bool:
    return values.get("system.driver_loaded", "1") != "0"


def kernel_version(values: State) -> str:
    """Version of the running module; differs from the user space's after an unfinished update."""
    return values.get("system.kernel_driver_version", values["system.driver_version"])


def mig_slices(values: State, gpu: int | None = None) -> list[tuple[int, int, int | None]]:
    """(GPU, GPU instance, compute instance or None for the GPU instance itself)"""
    found = []
    for key in values:
        match = re.fullmatch(r"gpu\.(\d+)\.gi\.(\d+)(?:\.ci\.(\d+))?", key)
        if match and gpu in (None, int(match[1])):
            found.append((int(match[1]), int(match[2]), int(match[3]) if match[3] else None))
    return found


# ---- files ------------------------------------------------------------------------------------


def put(path: Path, text: str, mode: int = 0o444) -> None:
    """Write when it differs. Folders stay the ones they are: they may be bind-mounted somewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.chmod(mode)
    new.replace(path)


def keep_only(folder: Path, names: set[str]) -> None:
    for item in list(folder.iterdir()) if folder.is_dir() else []:
        if item.name not in names:
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink()


def point(link: Path, target: str) -> None:
    if link.is_symlink() and os.readlink(link) == target:
        return
    link.unlink(missing_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def cpu_mask(cpus: str) -> str:
    """`0-3,8` as the kernel's comma-separated groups of eight hexadecimal digits."""
    mask = 0
    for part in cpus.split(","):
        low, _, high = part.partition("-")
        for cpu in range(int(low), int(high or low) + 1):
            mask |= 1 << cpu
    digits = f"{mask:x}"
    digits = digits.rjust(-(-len(digits) // 8) * 8, "0")
    return ",".join(digits[i : i + 8] for i in range(0, len(digits), 8))


# ---- /sys/bus/pci and /sys/module -------------------------------------------------------------


def pci_device(tree: Path, values: State, address: str, driver: str | None, files: dict[str, str]) -> None:
    folder = tree / "sys/bus/pci/devices" / address
    cpus = values.get(f"node.{files['numa_node']}", "0")
    files = {
        "subsystem_vendor": files["vendor"],
        "subsystem_device": "0x0000",
        "irq": "0",
        "revision": "0xa1",
        "enable": "1" if driver else "0",
        "local_cpulist": cpus,
        "local_cpus": cpu_mask(cpus),
        **files,
    }
    for name, text in files.items():
        put(folder / name, text + "\n")
    vendor, device, sub_vendor, sub_device, kind = (
        int(files[name], 16) for name in ("vendor", "device", "subsystem_vendor", "subsystem_device", "class")
    )
    modalias = f"pci:v{vendor:08X}d{device:08X}sv{sub_vendor:08X}sd{sub_device:08X}"
    put(folder / "modalias", f"{modalias}bc{kind >> 16:02X}sc{kind >> 8 & 255:02X}i{kind & 255:02X}\n")
    put(folder / "resource", "0x0000000000000000 0x0000000000000000 0x0000000000000000\n" * 7)
    config = bytearray(256)  # the header that lspci reads
    config[0:4] = vendor.to_bytes(2, "little") + device.to_bytes(2, "little")
    config[8:12] = bytes([0xA1]) + kind.to_bytes(3, "little")
    config[0x2C:0x30] = sub_vendor.to_bytes(2, "little") + sub_device.to_bytes(2, "little")
    (folder / "config").write_bytes(config)
    if driver:
        point(folder / "driver", f"../../drivers/{driver}")
        point(tree / "sys/bus/pci/drivers" / driver / address, f"../../devices/{address}")
    else:
        (folder / "driver").unlink(missing_ok=True)


def write_pci(tree: Path, values: State) -> None:
    loaded = driver_loaded(values)
    addresses = set()
    for index in indices(values, "gpu"):
        key = f"gpu.{index}"
        if values.get(f"{key}.pci.gone") == "1":
            continue
        address = values[f"{key}.pci.address"].lower()
        addresses.add(address)
        files = {
            "vendor": "0x10de",
            "device": values[f"{key}.pci.device_id"],
            "subsystem_device": values[f"{key}.pci.subsystem_id"],
            "class": "0x030200" if values.get(f"{key}.pci.subclass") == "2" else "0x030000",
            "irq": values.get(f"{key}.pci.irq", "0"),
            "numa_node": values[f"{key}.numa_node"],
        }
        pci_device(tree, values, address, "nvidia" if loaded else None, files)
    for index in indices(values, "switch"):
        address = values[f"switch.{index}.address"].lower()
        addresses.add(address)
        device = values[f"switch.{index}.device_id"]
        files = {"vendor": "0x10de", "device": device, "class": "0x068000", "numa_node": "0"}
        pci_device(tree, values, address, "nvidia-nvswitch" if loaded else None, files)
    for index in indices(values, "pci_extra"):
        key = f"pci_extra.{index}"
        address = values[f"{key}.address"].lower()
        addresses.add(address)
        files = {name: values[f"{key}.{name}"] for name in ("vendor", "device", "class", "numa_node")}
        pci_device(tree, values, address, values.get(f"{key}.driver") or None, files)
    devices, drivers = tree / "sys/bus/pci/devices", tree / "sys/bus/pci/drivers"
    for folder in (devices, drivers):
        folder.mkdir(parents=True, exist_ok=True)
    keep_only(devices, addresses)
    for link in drivers.glob("*/*"):
        if not (devices / link.name / "driver").is_symlink():
            link.unlink()


def write_modules(tree: Path, values: State) -> None:
    modules = tree / "sys/module"
    modules.mkdir(parents=True, exist_ok=True)
    references = {"nvidia": "2", "nvidia_uvm": "0", "nvidia_modeset": "0"}
    for name, references_now in references.items():
        if driver_loaded(values):
            put(modules / name / "version", kernel_version(values) + "\n")
            put(modules / name / "refcnt", values.get(f"module.{name}.refcnt", references_now) + "\n")
            put(modules / name / "initstate", "live\n")
            put(modules / name / "taint", f"{taint(values)}\n")
        else:
            shutil.rmtree(modules / name, ignore_errors=True)
    if driver_loaded(values):
        for name in ("nvidia_uvm", "nvidia_modeset"):
            (modules / "nvidia/holders" / name).mkdir(parents=True, exist_ok=True)


def taint(values: State) -> str:
    return "OE" if values.get("system.flavour") == "open" else "POE"


# ---- /proc/driver -----------------------------------------------------------------------------


def mig_minors() -> dict[str, int]:
    """Numbers of /dev/nvidia-caps: config, monitor, then every GPU's instances in a fixed order."""
    names = ["config", "monitor"]
    for gpu in range(16):
        for gi in range(15):
            names.append(f"gpu{gpu}/gi{gi}/access")
            names += [f"gpu{gpu}/gi{gi}/ci{ci}/access" for ci in range(8)]
    return {name: number for number, name in enumerate(names, 1)}


def capability(values: State, gpu: int, gi: int, ci: int | None) -> str:
    part = f"gi{gi}" if ci is None else f"gi{gi}/ci{ci}"
    return f"gpu{values[f'gpu.{gpu}.minor']}/{part}/access"


def write_proc(tree: Path, values: State) -> None:
    proc = tree / "proc/driver"
    proc.mkdir(parents=True, exist_ok=True)
    if not driver_loaded(values):
        keep_only(proc, set())
        return
    version, machine = kernel_version(values), platform.machine()
    if values.get("system.flavour") == "open":
        banner = f"NVIDIA UNIX Open Kernel Module for {machine}  {version}  Release Build"
    else:
        banner = f"NVIDIA UNIX {machine} Kernel Module  {version}"
    compiler = "gcc version 12.2.0 (Debian 12.2.0-14)"
    put(proc / "nvidia/version", f"NVRM version: {banner}  (gpusim)\nGCC version:  {compiler}\n")
    parameters = {**PARAMETERS, **{k.split(".", 1)[1]: v for k, v in values.items() if k.startswith("param.")}}
    put(proc / "nvidia/params", "".join(f"{name}: {value}\n" for name, value in parameters.items()))
    put(proc / "nvidia/registry", 'Binary: ""\n')
    write_gpu_information(proc / "nvidia/gpus", values)
    write_capabilities(proc, values)
    switches = indices(values, "switch")
    if switches:
        put(proc / "nvidia-nvswitch/permissions", "DeviceFileMinor: 255\nDeviceFileMode: 438\nDeviceFileModify: 1\n")
    for index in switches:
        address = values[f"switch.{index}.address"].lower()
        put(
            proc / "nvidia-nvswitch/devices" / address / "information",
            f"BIOS Version: 96.10.57.00.01\nBus Location: {address}\nDevice Minor: {index}\n",
        )


def write_gpu_information(folder: Path, values: State) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    present = set()
    for index in indices(values, "gpu"):
        key = f"gpu.{index}"
        if values.get(f"{key}.pci.gone") == "1":
            continue
        address = values[f"{key}.pci.address"].lower()
        present.add(address)
        lines = [
            f"Model: \t\t {values[f'{key}.name']}",
            f"IRQ:   \t\t {values.get(f'{key}.pci.irq', '0')}",
            f"GPU UUID: \t {values[f'{key}.uuid']}",
            f"Video BIOS: \t {values.get(f'{key}.vbios_version', '??.??.??.??.??')}",
            "Bus Type: \t PCIe",
            "DMA Size: \t 52 bits",
            "DMA Mask: \t 0xfffffffffffff",
            f"Bus Location: \t {address}",
            f"Device Minor: \t {values[f'{key}.minor']}",
            f"GPU Firmware: \t {values.get(f'{key}.gsp.version', 'N/A')}",
            "GPU Excluded:\t No",
        ]
        put(folder / address / "information", "\n".join(lines) + "\n")
    keep_only(folder, present)


def write_capabilities(proc: Path, values: State) -> None:
    minors = mig_minors()
    put(proc / "nvidia-caps/mig-minors", "".join(f"{name} {number}\n" for name, number in minors.items()))
    root = proc / "nvidia/capabilities"
    put(root / "mig/config", "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n")
    put(root / "mig/monitor", "DeviceFileMinor: 2\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    for gpu in indices(values, "gpu"):
        folder = root / f"gpu{values[f'gpu.{gpu}.minor']}/mig"
        slices = mig_slices(values, gpu)
        for _, gi, ci in slices:
            part = f"gi{gi}" if ci is None else f"gi{gi}/ci{ci}"
            minor = minors[capability(values, gpu, gi, ci)]
            put(folder / part / "access", f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
        keep_only(folder, {f"gi{gi}" for _, gi, _ in slices})
        for gi in {gi for _, gi, _ in slices}:
            cis = {f"ci{ci}" for _, other, ci in slices if other == gi and ci is not None}
            keep_only(folder / f"gi{gi}", {"access"} | cis)


# ---- /dev -------------------------------------------------------------------------------------


def device_nodes(values: State) -> list[str]:
    if not driver_loaded(values):
        return []
    caps = ["nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"]
    nodes = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", *caps]
    present = [i for i in indices(values, "gpu") if values.get(f"gpu.{i}.pci.gone") != "1"]
    nodes += [f"nvidia{values[f'gpu.{i}.minor']}" for i in present]
    switches = indices(values, "switch")
    if switches:
        nodes += ["nvidia-nvswitchctl", *(f"nvidia-nvswitch{i}" for i in switches)]
    minors = mig_minors()
    nodes += [f"nvidia-caps/nvidia-cap{minors[capability(values, *item)]}" for item in mig_slices(values)]
    missing = values.get("dev.missing", "").split(",")
    return [name for name in nodes if name not in missing]


def write_tree(tree: Path, values: State) -> None:
    """All stand-ins that follow from the state. Cheap and idempotent: run after every change."""
    write_pci(tree, values)
    write_modules(tree, values)
    write_proc(tree, values)
    put(tree / "dev.list", "".join(f"{name}\n" for name in device_nodes(values)), 0o644)


# ---- inside the host --------------------------------------------------------------------------


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def bind(source: Path, target: str) -> None:
    """Cover target with source, unless that is so. (A container may have mounts of its own there.)"""
    if not os.path.samefile(source, target):
        run("mount", "--bind", str(source), target)


def link_real_modules(tree: Path) -> None:
    """/sys/module cannot take a new folder, so it is covered by one that holds ours and points to the real ones."""
    if not os.path.samefile(tree / "sys/module", "/sys/module"):
        REAL_MODULES.mkdir(parents=True, exist_ok=True)
        bind(Path("/sys/module"), str(REAL_MODULES))
        run("mount", "--make-private", str(REAL_MODULES))  # else the cover below would propagate to it
    for item in REAL_MODULES.iterdir():
        if not (tree / "sys/module" / item.name).exists():
            point(tree / "sys/module" / item.name, str(item))


def cover_lists(tree: Path, values: State) -> None:
    """/proc/devices and /proc/modules with the driver's lines added to the real ones."""
    if (tree / "proc/devices").exists() and os.path.samefile(tree / "proc/devices", "/proc/devices"):
        return
    real = Path("/proc/devices").read_text(encoding="utf-8")
    put(tree / "proc/devices", real.replace("\nBlock devices:", f"{LINES_OF_PROC_DEVICES}\n\nBlock devices:", 1))
    bind(tree / "proc/devices", "/proc/devices")
    if not Path("/proc/modules").exists():
        return  # a kernel without loadable modules; no folder of /proc takes a new file
    tail = f"Live 0x0000000000000000 ({taint(values)})\n"
    lines = f"nvidia_uvm 4956160 0 - {tail}nvidia_modeset 1814528 0 - {tail}"
    lines += f"nvidia 103956480 2 nvidia_uvm,nvidia_modeset, {tail}"
    put(tree / "proc/modules", lines + Path("/proc/modules").read_text(encoding="utf-8"))
    bind(tree / "proc/modules", "/proc/modules")


def make_nodes(tree: Path) -> None:
    """Clones of /dev/null under NVIDIA's names: they open, which is all that the stand-ins promise."""
    wanted = (tree / "dev.list").read_text(encoding="utf-8").split()
    for path in [*Path("/dev").glob("nvidia*"), *Path("/dev/nvidia-caps").glob("nvidia-cap*")]:
        if not path.is_dir() and str(path.relative_to("/dev")) not in wanted:
            path.unlink()
    for name in wanted:
        path = Path("/dev") / name
        path.parent.mkdir(mode=0o755, exist_ok=True)
        if not path.exists():
            os.mknod(path, stat.S_IFCHR, os.makedev(1, 3))
            path.chmod(0o400 if name.endswith("nvidia-cap1") else 0o444 if "nvidia-cap" in name else 0o666)


def mount_all(tree: Path, values: State) -> None:
    link_real_modules(tree)
    bind(tree / "sys/module", "/sys/module")
    bind(tree / "sys/bus/pci", "/sys/bus/pci")
    bind(tree / "proc/driver", "/proc/driver")
    if driver_loaded(values):
        cover_lists(tree, values)
    make_nodes(tree)
    FREEZER.mkdir(parents=True, exist_ok=True)
    if not os.path.ismount(FREEZER):  # for hangs that outlive SIGKILL; not every kernel has it
        with contextlib.suppress(subprocess.CalledProcessError):
            run("mount", "-t", "cgroup", "-o", "freezer", "gpusim-freezer", str(FREEZER))


def unmount_all(tree: Path) -> None:
    for path in COVERED:
        source = tree / path.lstrip("/")
        while source.exists() and os.path.exists(path) and os.path.samefile(source, path):
            run("umount", "--lazy", path)
    for folder in (REAL_MODULES, FREEZER):
        if os.path.ismount(folder):
            run("umount", "--lazy", str(folder))
    for node in [*Path("/dev").glob("nvidia*"), *Path("/dev/nvidia-caps").glob("*")]:
        if not node.is_dir():
            node.unlink()
    with contextlib.suppress(FileNotFoundError):
        Path("/dev/nvidia-caps").rmdir()
