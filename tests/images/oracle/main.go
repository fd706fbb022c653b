// Lists what Go's archive/tar (docker's and containerd's reader) sees in each archive of a file:
// four bytes of length (little-endian), then the archive, again and again. One line an archive.
package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
)

func list(data []byte) string {
	var out []string
	r := tar.NewReader(bytes.NewReader(data))
	for {
		h, err := r.Next()
		if err == io.EOF {
			return "ok " + strings.Join(out, ";")
		}
		if err != nil {
			return "error"
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		sum := sha256.New()
		n, err := io.Copy(sum, r)
		if err != nil {
			return "error"
		}
		var x []string
		for k, v := range h.PAXRecords {
			if strings.HasPrefix(k, "SCHILY.xattr.") {
				x = append(x, fmt.Sprintf("%x=%x", k[13:], v))
			}
		}
		sort.Strings(x)
		kind := h.Typeflag
		if kind < '0' || kind > '7' {
			kind = 'X' // any byte is possible, a line's end too
		}
		out = append(out, fmt.Sprintf("%x,%x,%c,%d,%o,%d,%d,%d,%x,%s", h.Name, h.Linkname, kind, n, h.Mode&07777, h.Uid, h.Gid, h.ModTime.Unix(), sum.Sum(nil)[:8], strings.Join(x, "+")))
	}
}

func main() {
	in := bufio.NewReader(os.Stdin)
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for {
		var n uint32
		if binary.Read(in, binary.LittleEndian, &n) != nil {
			return
		}
		data := make([]byte, n)
		if _, err := io.ReadFull(in, data); err != nil {
			return
		}
		fmt.Fprintln(out, list(data))
	}
}
