"""Remedies for too little memory, alone and in pairs, with what each saves and costs."""
