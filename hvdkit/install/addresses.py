"""Edits for the addresses of workers: each host chooses its own (``local_address.h``).

So hosts need not share the names of interfaces, and horovodrun has nothing to probe before it
starts workers under Gloo.
"""

from pathlib import Path

from hvdkit.install.edits import Edit

__all__ = ["ADDRESSES"]

_CHOSEN = (
    "horovodrun refused hosts whose interfaces have different names, took loopback for a common "
    "one where they do not, and a worker without an address ended with a segmentation fault"
)
_PROBE = "horovod/runner/driver/driver_service.py: get_common_interfaces"
_LISTED = "--network-interfaces was a set: which of them was taken changed from run to run"

ADDRESSES = (
    Edit(
        name="address-definitions",
        path="horovod/common/gloo/gloo_context.cc",
        expected="namespace horovod {\nnamespace common {\n\nint ParseNextInt(",
        replacement=Path(__file__).with_name("local_address.h").read_text(encoding="utf-8")
        + "namespace horovod {\nnamespace common {\n\nint ParseNextInt(",
        reason=_CHOSEN,
        reference="third_party/gloo/gloo/transport/tcp/device.cc: lookupAddrForHostname",
    ),
    Edit(
        name="address-chosen",
        path="horovod/common/gloo/gloo_context.cc",
        expected="  attr device_attr;\n  device_attr.iface = gloo_iface_;\n",
        replacement="  attr device_attr = ChooseAddress(gloo_iface_);\n",
        reason=_CHOSEN,
        reference="horovod/common/gloo/gloo_context.cc: Initialize",
        count=3,
    ),
    Edit(
        name="address-of-launcher",
        path="horovod/runner/util/network.py",
        expected='''\
def get_driver_ip(nics):
    """
    :param nics: object return by `_driver_fn`
    :return: driver ip. We make sure all workers can connect to this ip.
    """
    iface = list(nics)[0]
    driver_ip = None
    for addr in net_if_addrs()[iface]:
        if addr.family == AF_INET:
            driver_ip = addr.address

    if not driver_ip:
        raise RuntimeError(
            'Cannot find an IPv4 address of the common interface.')

    return driver_ip
''',
        replacement='''\
def get_driver_ip(nics, host_names=()):
    """
    :param nics: interfaces to choose from, or None
    :param host_names: hosts that have to reach the address where nics is None
    :return: driver ip: of the first interface that is here, or the one on the way to the hosts
    """
    if not nics:
        return _get_ip_on_the_way_to(host_names)
    found = net_if_addrs()
    for iface in nics:
        for addr in found.get(iface, []):
            if addr.family == AF_INET:
                return addr.address
    here = ', '.join(f'{iface} {addr.address}' for iface, addrs in found.items()
                     for addr in addrs if addr.family == AF_INET)
    raise RuntimeError(
        f'--network-interfaces {",".join(nics)}: {socket.gethostname()} has no such interface with '
        f'an IPv4 address; it has {here}. Name one for each host, or leave the option out.')


def _get_ip_on_the_way_to(host_names):
    # Hosts that are this one tell nothing. The last two are for hosts that come later: the default
    # route (192.0.2.1 is nobody's, RFC 5737), and this host's name.
    own, unreached = [], []
    for host_name in [*host_names, '192.0.2.1', socket.gethostname()]:
        with socket.socket(AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host_name, 9))  # sends nothing
            except OSError:
                unreached.append(host_name)
                continue
            address, peer = probe.getsockname()[0], probe.getpeername()[0]
        if not address.startswith('127.'):
            if address != peer:
                return address
            own.append(address)
    unreached = [host_name for host_name in host_names if host_name in unreached]
    if own or not unreached:
        return [*own, '127.0.0.1'][0]
    raise RuntimeError(
        f'No address of {socket.gethostname()} leads to {", ".join(unreached)} (IPv4). Name the '
        'interface that does with --network-interfaces.')
''',
        reason=_CHOSEN,
        reference=_PROBE,
    ),
    Edit(
        name="address-without-probe",
        path="horovod/runner/launch.py",
        expected="""\
    nics = driver_service.get_common_interfaces(settings, all_host_names,
                                                remote_host_names, fn_cache)

    if args.run_func:
        # get the driver IPv4 address
        driver_ip = network.get_driver_ip(nics)
""",
        replacement="""\
    if remote_host_names and not args.nics \\
            and is_gloo_used(args.use_gloo, args.use_mpi, args.use_jsrun):
        nics = None  # each host chooses by its way to the launcher
    else:
        nics = driver_service.get_common_interfaces(settings, all_host_names,
                                                    remote_host_names, fn_cache)

    if args.run_func:
        # get the driver IPv4 address
        driver_ip = network.get_driver_ip(nics, all_host_names)
""",
        reason=_CHOSEN,
        reference=_PROBE,
    ),
    Edit(
        name="address-of-launcher-static",
        path="horovod/runner/launch.py",
        expected="""\
        driver_ip = network.get_driver_ip(nics)
        gloo_run(settings, nics, env, driver_ip, command)
""",
        replacement="""\
        driver_ip = network.get_driver_ip(nics, hosts.parse_hosts_and_slots(settings.hosts)[0])
        gloo_run(settings, nics, env, driver_ip, command)
""",
        reason=_CHOSEN,
        reference=_PROBE,
    ),
    Edit(
        name="address-elastic",
        path="horovod/runner/gloo_run.py",
        expected="""\
        # Host-to-host common interface detection requires at least 2 hosts in an elastic job.
        min_hosts = _get_min_start_hosts(settings)
        current_hosts = driver.wait_for_available_slots(settings.num_proc, min_hosts=min_hosts)
        return driver_service.get_common_interfaces(settings, current_hosts.host_assignment_order)
""",
        replacement="""\
        # Without a choice of the user, each host chooses by its way to the launcher.
        return settings.nics
""",
        reason=_CHOSEN + "; an elastic job did not start with one host",
        reference=_PROBE,
    ),
    Edit(
        name="address-of-launcher-elastic",
        path="horovod/runner/gloo_run.py",
        expected="    server_ip = network.get_driver_ip(nics)\n",
        replacement="""\
    current_hosts = driver.wait_for_available_slots(settings.num_proc)
    server_ip = network.get_driver_ip(nics, current_hosts.host_assignment_order)
""",
        reason=_CHOSEN,
        reference=_PROBE,
    ),
    Edit(
        name="address-told",
        path="horovod/runner/gloo_run.py",
        expected="""\
        'HOROVOD_GLOO_IFACE': list(nics)[0],   # TODO: add multiple ifaces in future
        'NCCL_SOCKET_IFNAME': ','.join(nics),
    }
""",
        replacement="""\
    }
    if nics:
        # Each host takes the first that it has.
        run_envs['HOROVOD_GLOO_IFACE'] = ','.join(nics)
        run_envs['NCCL_SOCKET_IFNAME'] = ','.join(nics)
""",
        reason=_CHOSEN,
        reference="horovod/runner/gloo_run.py: create_run_env_vars",
    ),
    Edit(
        name="address-listed",
        path="horovod/runner/launch.py",
        expected="            items = set() if items is None else items\n"
        "            items = items.union(values)\n",
        replacement="            items = list(dict.fromkeys([*(items or []), *values]))\n",
        reason=_LISTED,
        reference="horovod/runner/launch.py: make_nic_action",
    ),
    Edit(
        name="address-listed-run",
        path="horovod/runner/__init__.py",
        expected="set(network_interfaces) if network_interfaces else None",
        replacement="list(dict.fromkeys(network_interfaces)) if network_interfaces else None",
        reason=_LISTED,
        reference="horovod/runner/__init__.py: run",
    ),
)
