"""Edits for the launch of workers: on hosts as they are, and without secrets on command lines.

A worker's host chooses its own network interface or address (``local_address.h``), so hosts need
not share the names of interfaces, and nothing has to be probed before. What a worker's environment
holds reaches it through files and pipes, because everybody on a host can list command lines.
"""

from pathlib import Path

from hvdkit.install.edits import Edit

__all__ = ["LAUNCHING"]

_CHOSEN = (
    "horovodrun refused hosts whose interfaces have different names, took loopback for a common "
    "one where they do not, and a worker without an address ended with a segmentation fault"
)
_PROBE = "horovod/runner/driver/driver_service.py: get_common_interfaces"
_LISTED = "--network-interfaces was a set: which of them was taken changed from run to run"
_SECRETS = "ps showed the whole environment of each worker, on its own host and on the launcher's"
_LIFELINE = "workers on other hosts went on when horovodrun was ended, by Ctrl-C for one"
_SHELL = "horovod/runner/common/util/safe_shell_exec.py: _exec_middleman"
_SCRIPT = "horovod/runner/gloo_run.py: _slot_info_to_command_fn"

LAUNCHING = (
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
    # The last two are for hosts that come later: the default route (192.0.2.1 is nobody's,
    # RFC 5737), and this host's name.
    for host_name in [*host_names, '192.0.2.1', socket.gethostname()]:
        with socket.socket(AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((host_name, 9))  # sends nothing
            except OSError:
                continue
            address = probe.getsockname()[0]
        if not address.startswith('127.'):
            return address
    return '127.0.0.1'
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
    Edit(
        name="secrets-exported",
        path="horovod/runner/gloo_run.py",
        expected="def _slot_info_to_command_fn(run_command, env):\n",
        replacement='''\
# Names that a shell cannot export, or keeps for itself; they stay on env's command line.
_UNEXPORTABLE = re.compile(r'(?![A-Za-z_][A-Za-z0-9_]*$)|'
                           r'(BASH.*|DIRSTACK|ENV|E?UID|FUNCNAME|GROUPS|IFS|LINENO|OPT(ARG|IND)|'
                           r'PPID|PS[0-9]|RANDOM|SECONDS|SHELLOPTS|_)$')


def _export(variables):
    """Return the lines of a shell script that set variables."""
    return ''.join(f'export {name}={quote(str(value))}\\n' for name, value in variables.items()
                   if not _UNEXPORTABLE.match(name))


# A worker that ssh started outlives its connection. This waits for the end of the script's input,
# which is that of the connection, and ends what is left of the worker's process group then.
_LIFELINE = """\
exec 3<&0
(
  trap '' TERM
  cat <&3
  kill -0 $$ || exit
  kill -TERM 0
  for tenth in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do
    sleep 0.2
    kill -0 $$ || break
  done
  kill -KILL 0
) > /dev/null 2>&1 &
exec 3<&-
"""


def _to_remote_command(script, host_name, settings):
    """Return a command that runs a script on a host, and what it must read for that."""
    script = f'cd {quote(os.getcwd())} > /dev/null 2>&1\\n{script}'
    if env_util.is_kubeflow_mpi():  # kubectl exec has no standard input there
        return get_remote_command(quote(script), host=host_name), None
    ssh = get_remote_command('/bin/sh', host=host_name, port=settings.ssh_port,
                             identity_file=settings.ssh_identity_file)
    # In braces it is read as a whole before it runs, so that nothing is left for the lifeline.
    return f'exec {ssh}', f'{{\\n{_LIFELINE}{script}\\n}}\\n'


def _slot_info_to_command_fn(run_command, env):
''',
        reason=_SECRETS,
        reference=_SCRIPT,
    ),
    Edit(
        name="secrets-script",
        path="horovod/runner/gloo_run.py",
        expected="""\
        env_vars = create_slot_env_vars(slot_info)
        horovod_rendez_env = " ".join(
            [f"{k}={str(v)}" for k, v in env_vars.items()])

        return '{shell} {horovod_env} {env} {run_command}' .format(
            shell='env',
            horovod_env=horovod_rendez_env,
            env=' '.join(['%s=%s' % (key, quote(value)) for key, value in env.items()
                          if env_util.is_exportable(key)]),
            run_command=run_command)
""",
        replacement="""\
        passed = {key: value for key, value in env.items() if env_util.is_exportable(key)}
        kept = [quote(f'{key}={value}') for key, value in passed.items()
                if _UNEXPORTABLE.match(key)]
        exports = _export({**passed, **create_slot_env_vars(slot_info)})
        return f"{exports}set -- {' '.join(kept)}\\n{run_command}"
""",
        reason=_SECRETS,
        reference=_SCRIPT,
    ),
    Edit(
        name="secrets-run-command",
        path="horovod/runner/gloo_run.py",
        expected="""\
    env_string = " ".join(
        [f"{k}={str(v)}" for k, v in env_vars.items()])
    run_command = (
        '{env_string} '
        '{command}'  # expect a lot of environment variables
        .format(env_string=env_string,
                command=' '.join(quote(par) for par in command)))
    return run_command
""",
        replacement="""\
    # "$@" are the variables that only env can set.
    words = ' '.join(quote(par) for par in command)
    return f'{_export(env_vars)}exec env "$@" {words} < /dev/null'
""",
        reason=_SECRETS,
        reference="horovod/runner/gloo_run.py: get_run_command",
    ),
    Edit(
        name="secrets-remote",
        path="horovod/runner/gloo_run.py",
        expected="""\
            local_command = quote('cd {pwd} > /dev/null 2>&1 ; {command}'
                                  .format(pwd=os.getcwd(), command=command))
            command = get_remote_command(local_command,
                                         host=host_name,
                                         port=settings.ssh_port,
                                         identity_file=settings.ssh_identity_file)
""",
        replacement="            command, stdin = "
        "_to_remote_command(command, host_name, settings)\n",
        reason=_SECRETS,
        reference="horovod/runner/gloo_run.py: _exec_command_fn",
    ),
    Edit(
        name="lifeline-local",
        path="horovod/runner/gloo_run.py",
        expected="        host_name = slot_info.hostname\n\n",
        replacement="        host_name = slot_info.hostname\n        stdin = None\n\n",
        reason=_LIFELINE,
        reference="horovod/runner/gloo_run.py: _exec_command_fn",
    ),
    Edit(
        name="lifeline-passed",
        path="horovod/runner/gloo_run.py",
        expected="                                                index=index,\n",
        replacement="                                                index=index,\n"
        "                                                stdin=stdin,\n",
        reason=_LIFELINE,
        reference="horovod/runner/gloo_run.py: _exec_command_fn",
    ),
    Edit(
        name="lifeline-option",
        path="horovod/runner/common/util/safe_shell_exec.py",
        expected="            prefix_output_with_timestamp=False):\n",
        replacement="            prefix_output_with_timestamp=False, stdin=None):\n",
        reason=_LIFELINE,
        reference=_SHELL,
    ),
    Edit(
        name="lifeline-argument",
        path="horovod/runner/common/util/safe_shell_exec.py",
        expected="(r, w)))\n",
        replacement="(r, w), stdin))\n",
        reason=_LIFELINE,
        reference=_SHELL,
    ),
    Edit(
        name="lifeline-parameter",
        path="horovod/runner/common/util/safe_shell_exec.py",
        expected="def _exec_middleman(command, env, exit_event, stdout, stderr, rw):\n",
        replacement="def _exec_middleman(command, env, exit_event, stdout, stderr, rw,\n"
        "                    stdin=None):\n",
        reason=_LIFELINE,
        reference=_SHELL,
    ),
    Edit(
        name="lifeline-silence",
        path="horovod/runner/util/remote.py",
        expected="SSH_COMMAND_PREFIX = "
        "'ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no'\n",
        replacement="""\
# A host that vanishes says nothing: the connection is given up after half a minute.
SSH_COMMAND_PREFIX = ('ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no '
                      '-o ServerAliveInterval=10 -o ServerAliveCountMax=3')
""",
        reason="an elastic job waited for ever for a host that was cut off from the network",
        reference="horovod/runner/util/remote.py",
    ),
    Edit(
        name="secrets-imports",
        path="horovod/runner/gloo_run.py",
        expected="import os\nimport signal\nimport sys\nimport threading\nimport time\n",
        replacement="import os\nimport re\nimport signal\nimport sys\nimport threading\n"
        "import time\n",
        reason=_SECRETS,
        reference=_SCRIPT,
    ),
    Edit(
        name="secrets-shell",
        path="horovod/runner/common/util/safe_shell_exec.py",
        expected="""\
    executor_shell = subprocess.Popen(command, shell=True, env=env,
                                      stdout=stdout_w, stderr=stderr_w)
""",
        replacement="""\
    # Not as an argument: it may hold secrets, and everybody can list arguments.
    with os.fdopen(os.memfd_create('command'), 'wb') as script:
        script.write(os.fsencode(command))
        script.flush()
        executor_shell = subprocess.Popen(['/bin/sh', f'/dev/fd/{script.fileno()}'], env=env,
                                          pass_fds=[script.fileno()],
                                          stdin=None if stdin is None else subprocess.PIPE,
                                          stdout=stdout_w, stderr=stderr_w)

    def write_stdin():
        # Left open: that it ends tells the other side that this process is gone.
        try:
            rest = os.fsencode(stdin)
            while rest:
                rest = rest[os.write(executor_shell.stdin.fileno(), rest):]
        except OSError:
            pass  # the command has ended

    if stdin is not None:
        in_thread(write_stdin)
""",
        reason=_SECRETS,
        reference=_SHELL,
    ),
)
