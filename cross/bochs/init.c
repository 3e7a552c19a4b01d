/* The only process of the machine that is not a test: runs the program that /command names and says how
 * it ended. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum { WORDS = 256 };

static char text[1 << 16];

/* /command: words that end in zero bytes. `NAME=value` for the environment up to an empty word, then the
 * program and its arguments. */
static int run(void) {
    char *environment[WORDS] = {0}, *arguments[WORDS] = {0};
    size_t names = 0, count = 0;
    FILE *file = fopen("/command", "rb");
    if (!file)
        return 125;
    size_t len = fread(text, 1, sizeof text - 1, file);
    char *at = text, *end = text + len;
    for (; at < end && *at && names + 1 < WORDS; at += strlen(at) + 1)
        environment[names++] = at;
    for (at++; at < end && count + 1 < WORDS; at += strlen(at) + 1)
        arguments[count++] = at;

    pid_t child = fork();
    if (child == 0) {
        execve(arguments[0], arguments, environment);
        perror(arguments[0]);
        _exit(126);
    }
    int status = 0;
    while (child > 0 && waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            return 125;
    if (child < 0)
        return 125;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main(void) {
    mkdir("/proc", 0755);
    mount("proc", "/proc", "proc", 0, NULL);
    int code = run();
    printf("\nk3: exit %d\n", code);
    fflush(stdout);
    tcdrain(STDOUT_FILENO); /* to the last letter */
    reboot(RB_AUTOBOOT);
    return 1;
}
