"""Plan, edit, build, cache and prove a Horovod for the frameworks of this environment.

Nothing here imports a framework, except the workers that prove a build.
"""
