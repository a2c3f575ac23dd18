"""Edits for how horovodrun starts workers, on its own host and through ssh.

What a worker's environment holds reaches it through files and pipes, because everybody on a host
can list command lines. The pipe of a worker on another host ends with horovodrun, and the worker
with it.
"""

from hvdkit.install.edits import Edit

__all__ = ["WORKER_START"]

_SECRETS = "ps showed the whole environment of each worker, on its own host and on the launcher's"
_LIFELINE = "workers on other hosts went on when horovodrun was ended, by Ctrl-C for one"
_SHELL = "horovod/runner/common/util/safe_shell_exec.py: _exec_middleman"
_SCRIPT = "horovod/runner/gloo_run.py: _slot_info_to_command_fn"

WORKER_START = (
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
    folder = os.getcwd()
    warning = f'horovodrun: {host_name} has no folder {folder}; the worker starts in its home'
    script = f'cd {quote(folder)} 2> /dev/null || echo {quote(warning)} >&2\\n{script}'
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
        name="launch-without-home",
        path="horovod/runner/launch.py",
        expected="""\
        fn_cache = cache.Cache(CACHE_FOLDER, CACHE_STALENESS_THRESHOLD_MINUTES,
                               parameters_hash)
""",
        replacement="""\
        try:
            fn_cache = cache.Cache(CACHE_FOLDER, CACHE_STALENESS_THRESHOLD_MINUTES,
                                   parameters_hash)
        except OSError:
            pass  # no home to keep it in
""",
        reason="horovodrun failed where the user's home cannot be written to, as in containers",
        reference="horovod/runner/launch.py: _run_static",
    ),
    Edit(
        name="launch-past-proxies",
        path="horovod/runner/http/http_client.py",
        expected="from urllib.request import urlopen\n\n"
        "from horovod.runner.common.util import codec\n",
        replacement="""\
from urllib.request import ProxyHandler, build_opener

from horovod.runner.common.util import codec

# A proxy that a variable names cannot reach the job's hosts.
urlopen = build_opener(ProxyHandler({})).open
""",
        reason="with http_proxy set, workers of elastic jobs and horovod.run asked the proxy for "
        "their launcher",
        reference="horovod/runner/http/http_client.py",
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
