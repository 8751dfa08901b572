"""The plug-in file for ms-swift's ``--external_plugins``."""

from glm4v_patched.integrations.ms_swift import register

register()
