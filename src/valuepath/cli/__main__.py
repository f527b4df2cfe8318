from valuepath.cli import main

main()
